// What a call to an expert server on the same box costs besides computing: trunk -> experts ->
// trunk for one row of released size (3,584 floats there, 3,584 64-bit sums back), through the
// fast lane and through ZeroMQ, and beside them what two wake-ups cost with nothing to carry: no
// sleeping lane can be faster.
//
// The caller does what services/trunk/expert_client.cc does, the server (this program once more, as
// another process) what services/experts does, but for the arithmetic.

#include <fmt/format.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <csignal>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <future>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <vector>

#include "bench/futex_hop.h"
#include "bench/machine.h"
#include "common/base/cores.h"
#include "common/base/wake_latency.h"
#include "common/transport/arena.h"
#include "common/transport/channel.h"
#include "common/transport/lane_host.h"
#include "common/transport/server.h"
#include "common/transport/tensor_io.h"

extern char** environ;

namespace {

namespace fs = std::filesystem;
using namespace k3;

constexpr std::size_t kLatent = 3584;
constexpr std::uint32_t kTopK = 16;
constexpr std::int64_t kAskMs = 10'000;
constexpr std::int64_t kSpinUs = 1000;

struct Options {
    std::size_t n_calls = 20'000;
    fs::path json_file;
    std::string serve;  // endpoint; empty: measure
    bool spin = false;
    int core = -1;
};

struct Case {
    const char* lane = "";  // "fast", "zeromq", "futex"
    bool use_shm = true;
    bool pinned = false;
    bool spin = false;
    bool wake = false;  // as services do it: idle cores kept from deep sleep
};

/// Thrown, so that the server of a run that fails is ended on the way out.
struct Failure {
    std::string sentence;
};

[[noreturn]] void fail(std::string sentence) { throw Failure{std::move(sentence)}; }

template <typename T>
T value_or_fail(Result<T> result) {
    if (!result.has_value()) fail(result.error().sentence());
    return std::move(result).value();
}

void run_on(int core) {
    if (Status kept = keep_to_cores(std::to_string(core)); !kept.has_value())
        fail(kept.error().sentence());
}

// ---- the server --------------------------------------------------------------------------------

void answer(const transport::Request& request, const msg::ExpertCall& call,
            std::vector<msg::Bytes> frames, transport::ArenaReader& reader,
            transport::Arena& arena) {
    const std::uint64_t shape[] = {1, kLatent};
    const msg::Bytes bytes = value_or_fail(
        transport::take_tensor(call.rows, "rows", msg::DType::f32, shape, frames, reader));
    static std::vector<std::int64_t> sums(kLatent);
    sums[0] = static_cast<std::int64_t>(transport::view_as<float>(bytes)[0]);
    msg::PartialSums reply;
    std::vector<msg::Bytes> out;
    reply.sums = transport::put_tensor(msg::DType::i64, {1, kLatent},
                                       std::as_bytes(std::span(sums)), &arena, call.reply_shm, out);
    request.responder.send(std::move(reply), std::move(out));
}

int serve(const Options& options) {
    if (options.core >= 0) run_on(options.core);
    transport::install_stop_signals();
    const auto run = static_cast<std::uint64_t>(::getpid());
    auto arena = value_or_fail(transport::Arena::create(
        {transport::segment_name(run, "hop"), kLatent * sizeof(std::int64_t), 8}));
    transport::Server::Options how;
    how.endpoint = options.serve;
    how.announcement.kind = msg::ServiceKind::experts;
    how.announcement.name = "hop";
    transport::LaneHost::Options lanes;
    lanes.spin_us = options.spin ? kSpinUs : 0;
    how.lanes = value_or_fail(transport::LaneHost::create(lanes));
    auto server = value_or_fail(transport::Server::create(std::move(how)));
    msg::Announcement announcement;
    announcement.arena = arena->probe();
    server->set_ready(std::move(announcement));
    transport::ArenaReader reader;
    while (!server->stopping()) {
        auto request = server->next(Deadline::after_ms(1000));
        if (!request) continue;
        if (const auto* call = std::get_if<msg::ExpertCall>(&request->envelope.body))
            answer(*request, *call, std::move(request->frames), reader, *arena);
    }
    return 0;
}

/// This program as the server of one case.
class ServerProcess {
  public:
    ServerProcess(const Case& which, const std::string& endpoint, int core) {
        std::vector<std::string> words = {fs::read_symlink("/proc/self/exe").string(), "--serve",
                                          endpoint};
        if (which.spin) words.push_back("--spin");
        if (which.pinned) words.insert(words.end(), {"--core", std::to_string(core)});
        std::vector<char*> argv;
        argv.reserve(words.size() + 1);
        for (std::string& word : words) argv.push_back(word.data());
        argv.push_back(nullptr);
        const int error = posix_spawn(&pid_, argv[0], nullptr, nullptr, argv.data(), environ);
        if (error != 0) fail(fmt::format("cannot start the server: {}", strerror(error)));
    }
    ~ServerProcess() {
        ::kill(pid_, SIGTERM);
        ::waitpid(pid_, nullptr, 0);
    }
    ServerProcess(const ServerProcess&) = delete;
    ServerProcess& operator=(const ServerProcess&) = delete;

  private:
    pid_t pid_ = -1;
};

// ---- the caller --------------------------------------------------------------------------------

class Caller {
  public:
    Caller(const Case& which, const std::string& endpoint) : use_shm_(which.use_shm) {
        arena_ = value_or_fail(transport::Arena::create(
            {transport::segment_name(static_cast<std::uint64_t>(::getpid()), "hop-calls"),
             kLatent * sizeof(float), 4}));
        transport::Channel::Options options;
        options.endpoint = endpoint;
        options.peer = "hop";
        options.use_lane = std::string(which.lane) == "fast";
        const bool use_lane = options.use_lane;
        channel_ = value_or_fail(transport::Channel::create(std::move(options)));
        value_or_fail(channel_->hello({arena_->probe()}, Deadline::after_ms(kAskMs)));
        if (channel_->lane().is_open != use_lane) fail("the server gave no fast lane");
        channel_->set_lane_spin_us(which.spin ? kSpinUs : 0);
        row_.resize(kLatent, 1.0F);
    }

    /// One hop; the sums must be the reply to this very row.
    void call(std::size_t number) {
        row_[0] = static_cast<float>(number);
        msg::ExpertCall body;
        body.layer = 1;
        body.reply_shm = use_shm_;
        body.picks.reserve(kTopK);
        for (std::uint32_t rank = 0; rank < kTopK; ++rank)
            body.picks.push_back({0, 7 * rank, 0.0625F, rank});
        std::vector<msg::Bytes> frames;
        body.rows =
            transport::put_tensor(msg::DType::f32, {1, kLatent}, std::as_bytes(std::span(row_)),
                                  arena_.get(), use_shm_, frames);
        auto reply = value_or_fail(
            channel_->call(std::move(body), std::move(frames), Deadline::after_ms(kAskMs)));
        const auto* sums = std::get_if<msg::PartialSums>(&reply.body);
        if (sums == nullptr) fail("the server answered with something else");
        const std::uint64_t shape[] = {1, kLatent};
        const msg::Bytes bytes = value_or_fail(transport::take_tensor(
            sums->sums, "sums", msg::DType::i64, shape, reply.frames, reader_));
        if (transport::view_as<std::int64_t>(bytes)[0] != static_cast<std::int64_t>(number))
            fail("a reply holds the sums of another call");
    }

  private:
    const bool use_shm_;
    std::unique_ptr<transport::Arena> arena_;
    std::unique_ptr<transport::Channel> channel_;
    transport::ArenaReader reader_;
    std::vector<float> row_;
};

struct Distribution {
    double p50_us = 0;
    double p90_us = 0;
    double p99_us = 0;
};

Distribution distribution_of(std::vector<double> us) {
    std::sort(us.begin(), us.end());
    const auto at = [&](std::size_t percent) { return us[(us.size() - 1) * percent / 100]; };
    return {at(50), at(90), at(99)};
}

Distribution measure(const Case& which, std::size_t n_calls, const CoreSet& cores) {
    WakeLatency wake;
    if (which.wake) wake.busy();
    if (which.lane == std::string_view("futex")) {
        CoreSet ends;
        if (which.pinned) ends = {cores.front(), cores.back()};
        return distribution_of(value_or_fail(bench::futex_round_trips(n_calls, ends)));
    }
    const fs::path socket = fs::temp_directory_path() / fmt::format("k3-hop-{}.sock", ::getpid());
    const std::string endpoint = "ipc://" + socket.string();
    ServerProcess server(which, endpoint, cores.back());  // may run where this thread may by now
    if (which.pinned) run_on(cores.front());
    Caller caller(which, endpoint);
    std::size_t number = 0;
    while (number < std::min<std::size_t>(n_calls, 1000)) caller.call(number++);
    std::vector<double> us(n_calls);
    for (double& one : us) {
        const double start = bench::now();
        caller.call(number++ % 10'000'000);
        one = 1e6 * (bench::now() - start);
    }
    return distribution_of(std::move(us));
}

int run(const Options& options) {
    const CoreSet cores = machine_cores().allowed;
    std::vector<Case> cases;
    for (const bool pinned : {true, false}) {
        if (pinned && cores.size() < 2) continue;  // no core for each side
        cases.push_back({"fast", false, pinned, true, true});
        for (const bool wake : {true, false}) {
            cases.push_back({"fast", false, pinned, false, wake});
            cases.push_back({"zeromq", true, pinned, false, wake});
            cases.push_back({"zeromq", false, pinned, false, wake});
            cases.push_back({"futex", false, pinned, false, wake});
        }
    }
    nlohmann::json json;
    json["cpu"] = bench::cpu_model();
    json["cores"] = cores.size();
    json["calls"] = options.n_calls;
    fmt::print("{}, {} cores; {} calls a line, microseconds\n\n", bench::cpu_model(), cores.size(),
               options.n_calls);
    WakeLatency permission;
    permission.busy();
    if (!permission.held())
        fmt::print("{} cannot be opened: 'wake fast' is the system's\n\n", WakeLatency::kDevice);
    permission.idle();
    fmt::print("  {:<8}{:<10}{:<8}{:<6}{:<8}{:>9}{:>9}{:>9}\n", "lane", "tensors", "pinned", "spin",
               "wake", "p50", "p90", "p99");
    for (const Case& which : cases) {
        // On a thread of its own, which may keep itself to one core.
        const Distribution d =
            std::async(std::launch::async, measure, which, options.n_calls, cores).get();
        const bool empty = which.lane == std::string_view("futex");
        const char* tensors = empty ? "none" : which.use_shm ? "arena" : "message";
        const char* wake = which.wake ? "fast" : "system";
        fmt::print("  {:<8}{:<10}{:<8}{:<6}{:<8}{:>9.1f}{:>9.1f}{:>9.1f}\n", which.lane, tensors,
                   which.pinned ? "yes" : "no", which.spin ? "yes" : "no", wake, d.p50_us, d.p90_us,
                   d.p99_us);
        std::fflush(stdout);
        json["hops"].push_back({{"lane", which.lane},
                                {"tensors", tensors},
                                {"pinned", which.pinned},
                                {"spin", which.spin},
                                {"wake", wake},
                                {"p50_us", d.p50_us},
                                {"p90_us", d.p90_us},
                                {"p99_us", d.p99_us}});
    }
    if (options.json_file.empty()) return 0;
    std::ofstream file(options.json_file);
    file << json.dump(2) << "\n";
    file.flush();
    if (!file) fail(fmt::format("cannot write {}", options.json_file.string()));
    return 0;
}

}  // namespace

int main(int argc, char** argv) {
    CLI::App app{"What a call to an expert server on the same box costs besides computing."};
    Options options;
    app.add_option("--calls", options.n_calls, "for each line")
        ->check(CLI::PositiveNumber)
        ->capture_default_str();
    app.add_option("--json", options.json_file, "also write the results to this file");
    app.add_option("--serve", options.serve)->group("");
    app.add_flag("--spin", options.spin)->group("");
    app.add_option("--core", options.core)->group("");
    try {
        app.parse(argc, argv);
    } catch (const CLI::ParseError& error) {
        return app.exit(error) == 0 ? 0 : 2;
    }
    try {
        return options.serve.empty() ? run(options) : serve(options);
    } catch (const Failure& failure) {
        fmt::print(stderr, "hop: {}\n", failure.sentence);
        return 1;
    }
}
