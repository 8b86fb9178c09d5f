// Expert servers that are killed, frozen and cut off at random moments of a generation: the same
// bytes as without, no hang, and how long it takes until it is noticed and until text goes on.
//
// K3_SOAK=N does N of them and prints the times as the table of docs/operating.md.

#include <doctest/doctest.h>
#include <signal.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "tests/faults/troubled_pipeline.h"

using namespace k3;
using namespace k3::test;

namespace {

enum class Kind {
    killed,      // SIGKILL; the launcher starts it again
    far_killed,  // likewise, behind a proxy, started again by hand
    frozen,      // SIGSTOP, and SIGKILL when it has been given up
    thawed,      // SIGSTOP, and SIGCONT when it has been given up
    paused,      // SIGSTOP, and SIGCONT before that
    cut,         // its connections are closed
    held,        // nothing passes, until it has been given up
};
constexpr std::size_t kKinds = 7;
constexpr const char* kNames[kKinds] = {
    "killed", "killed (TCP)",      "frozen, then killed", "frozen, then continued",
    "paused", "connection closed", "nothing passes"};
constexpr std::int64_t kHangMs = 60'000;

/// Adds up the time in which this machine let nobody run: whoever sleeps for a moment wakes late
/// then. What the trunk promises holds on a machine that lets it look at its clock.
class StallWatch {
  public:
    StallWatch() : thread_([this] { run(); }) {}
    ~StallWatch() {
        stop_ = true;
        thread_.join();
    }
    StallWatch(const StallWatch&) = delete;
    StallWatch& operator=(const StallWatch&) = delete;
    double ms() const noexcept { return static_cast<double>(late_us_) / 1e3; }

  private:
    void run() {
        constexpr std::chrono::milliseconds kNap{5};
        constexpr std::chrono::milliseconds kUsual{20};  // late by less is no stall
        while (!stop_) {
            const Clock::time_point begin = Clock::now();
            std::this_thread::sleep_for(kNap);
            const auto late = Clock::now() - begin - kNap;
            if (late > kUsual)
                late_us_ += std::chrono::duration_cast<std::chrono::microseconds>(late).count();
        }
    }
    std::atomic<bool> stop_ = false;
    std::atomic<std::int64_t> late_us_ = 0;
    std::thread thread_;
};

struct Times {
    std::vector<double> detected_ms;
    std::vector<double> bound_ms;    // on that
    std::vector<double> stalled_ms;  // of that time, the machine
    std::vector<double> recovered_ms;
};

class Trouble {
  public:
    Trouble(TroubledPipeline& pipeline, std::mt19937& random)
        : pipeline_(pipeline), random_(random) {}

    void make(Kind kind) {
        const std::string name = kNames[static_cast<std::size_t>(kind)];
        CAPTURE(name);
        REQUIRE(pipeline_.is_whole());
        std::this_thread::sleep_for(std::chrono::milliseconds(random_() % 100));
        // The end of a former trouble may have come late: what is lost already cannot be lost.
        REQUIRE(pipeline_.is_whole());
        const std::uint64_t losses = pipeline_.counter("expert_server_losses");
        const std::size_t near = random_() % pipeline_.n_near();
        const std::size_t far = random_() % pipeline_.n_far();
        const pid_t pid = pipeline_.near_pid(near);
        REQUIRE(pid > 0);
        const double stalled_ms = stalls_.ms();
        begin_ = Clock::now();
        switch (kind) {
            case Kind::killed:
                ::kill(pid, SIGKILL);
                break;
            case Kind::far_killed:
                pipeline_.kill_far(far);
                break;
            case Kind::cut:
                pipeline_.proxy(far).cut();
                break;
            case Kind::held:
                pipeline_.proxy(far).hold(true);
                break;
            case Kind::paused:
                ::kill(pid, SIGSTOP);
                std::this_thread::sleep_for(std::chrono::milliseconds(random_() % 1000));
                ::kill(pid, SIGCONT);
                break;
            case Kind::frozen:
            case Kind::thawed:
                ::kill(pid, SIGSTOP);
                break;
        }
        Times& times = times_[kind];
        if (kind != Kind::paused) {
            const bool is_noticed =
                wait([&] { return pipeline_.counter("expert_server_losses") > losses; });
            times.detected_ms.push_back(ms());
            times.stalled_ms.push_back(stalls_.ms() - stalled_ms);
            const bool is_silent =
                kind == Kind::frozen || kind == Kind::thawed || kind == Kind::held;
            times.bound_ms.push_back(is_silent ? 2000.0 + static_cast<double>(pipeline_.counter(
                                                              "expert_calls_late_after_ms"))
                                               : 1000.0);
            if (kind == Kind::far_killed) pipeline_.start_far(far);
            if (kind == Kind::held) pipeline_.proxy(far).hold(false);
            if (kind == Kind::thawed) ::kill(pid, SIGCONT);
            if (kind == Kind::frozen) ::kill(pid, SIGKILL);
            REQUIRE(is_noticed);
        }
        const std::uint64_t n_tokens = pipeline_.n_tokens();
        REQUIRE(wait([&] { return pipeline_.n_tokens() > n_tokens; }));
        times.recovered_ms.push_back(ms());
    }

    const std::map<Kind, Times>& times() const noexcept { return times_; }

  private:
    double ms() const {
        return std::chrono::duration<double, std::milli>(Clock::now() - begin_).count();
    }
    /// False after a minute, or when a generation went wrong.
    template <typename Done>
    bool wait(Done done) {
        while (!done()) {
            if (const std::string failure = pipeline_.failure(); !failure.empty()) {
                FAIL_CHECK(failure);
                return false;
            }
            if (ms() > kHangMs) return false;
            std::this_thread::sleep_for(std::chrono::milliseconds(2));
        }
        return true;
    }

    TroubledPipeline& pipeline_;
    std::mt19937& random_;
    StallWatch stalls_;
    Clock::time_point begin_;
    std::map<Kind, Times> times_;
};

std::string quantiles(std::vector<double> values) {
    if (values.empty()) return "- | - | - | -";
    std::sort(values.begin(), values.end());
    std::string text;
    for (double q : {0.5, 0.9, 0.99, 1.0}) {
        const auto rank = static_cast<std::size_t>(q * static_cast<double>(values.size() - 1));
        text += (text.empty() ? "" : " | ") + std::to_string(std::lround(values[rank]));
    }
    return text;
}

void print(int n_replicas, const std::map<Kind, Times>& all) {
    std::printf(
        "\nreplicas %d | n | noticed p50 | p90 | p99 | max | text goes on p50 | p90 | p99 | "
        "max (ms)\n",
        n_replicas);
    for (const auto& [kind, times] : all)
        std::printf("%s | %zu | %s | %s\n", kNames[static_cast<std::size_t>(kind)],
                    times.recovered_ms.size(), quantiles(times.detected_ms).c_str(),
                    quantiles(times.recovered_ms).c_str());
    std::fflush(stdout);
}

/// What is promised, besides the deadline that the server's call had. A stall of the machine counts
/// twice: it holds up the thread that pings and, after it, the one that judges.
void check_bounds(const std::map<Kind, Times>& all) {
    std::size_t n_late = 0;
    double stalled_ms = 0;
    for (const auto& [kind, times] : all)
        for (std::size_t i = 0; i < times.detected_ms.size(); ++i) {
            const double excused_ms = 2 * times.stalled_ms[i];
            CAPTURE(excused_ms);
            CHECK(times.detected_ms[i] <= times.bound_ms[i] + excused_ms);
            n_late += times.detected_ms[i] > times.bound_ms[i] ? 1 : 0;
            stalled_ms += times.stalled_ms[i];
        }
    std::printf("late only because the machine stood still: %zu; it did so for %.1f s in all\n",
                n_late, stalled_ms / 1e3);
    std::fflush(stdout);
}

std::vector<Kind> plan(int n_replicas, std::mt19937& random) {
    std::vector<Kind> kinds;
    const char* soak = std::getenv("K3_SOAK");
    if (soak == nullptr) {
        kinds.assign(7, Kind::killed);
        for (Kind kind : {Kind::far_killed, Kind::cut, Kind::cut, Kind::paused})
            kinds.push_back(kind);
        kinds.push_back(n_replicas == 1 ? Kind::thawed : Kind::held);
        if (n_replicas == 2) kinds.push_back(Kind::frozen);
    } else {
        // In parts of a hundred, in the order of Kind.
        std::discrete_distribution<int> pick({45, 10, 10, 10, 5, 8, 12});
        for (int i = 0; i < std::atoi(soak) / 2; ++i)
            kinds.push_back(static_cast<Kind>(pick(random)));
    }
    std::shuffle(kinds.begin(), kinds.end(), random);
    return kinds;
}

}  // namespace

TEST_CASE("expert servers in trouble at random moments: no wrong bit and no hang") {
    for (int n_replicas : {1, 2}) {
        const unsigned seed = std::random_device{}();
        CAPTURE(n_replicas);
        CAPTURE(seed);
        std::mt19937 random(seed);
        World world;
        TroubledPipeline pipeline(world, n_replicas);
        Trouble trouble(pipeline, random);
        for (Kind kind : plan(n_replicas, random)) trouble.make(kind);
        CHECK(pipeline.is_whole());
        CHECK_MESSAGE(pipeline.failure().empty(), pipeline.failure());
        if (std::getenv("K3_SOAK") == nullptr) continue;
        print(n_replicas, trouble.times());
        check_bounds(trouble.times());
    }
}
