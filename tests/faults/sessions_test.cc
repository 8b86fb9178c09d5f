// k3-trunk killed while it saves a session: the next one finds the old file or the new one, whole,
// and nothing else.
//
// K3_SESSION_KILLS=200 kills more often than the suite has time for.

#include <doctest/doctest.h>
#include <signal.h>

#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "common/transport/channel.h"
#include "tests/support/checkpoint_copy.h"
#include "tests/support/golden.h"
#include "tests/support/pipeline.h"

using namespace k3;
using namespace k3::test;

namespace {

constexpr std::uint64_t kShort = 20;  // ids of the two sessions that are saved in turn
constexpr std::uint64_t kLong = 40;

std::vector<std::uint32_t> first_ids(std::uint64_t n) {
    std::vector<std::uint32_t> ids;
    for (std::uint32_t i = 0; i < n; ++i) ids.push_back(3 + i * 7);
    return ids;
}

/// Layer 0 of tiny-k3, which needs no expert servers.
class Trunk {
  public:
    Trunk(const World& world, const std::filesystem::path& sessions)
        : program_(world.start_program(
              {built("services/trunk/k3-trunk").string(), "--model",
               (golden_dir() / "tiny-k3").string(), "--layers", "0-0", "--threads", "1",
               "--payload", "inline", "--listen", "ipc://" + (world.path() / "trunk").string(),
               "--session-bytes", "16MiB", "--session-dir", sessions.string()})) {
        transport::Channel::Options options;
        options.endpoint = "ipc://" + (world.path() / "trunk").string();
        options.peer = "trunk";
        channel_ = transport::Channel::create(std::move(options)).value();
        const auto hello = channel_->hello({}, Deadline::after_ms(30000));
        REQUIRE_MESSAGE(hello.has_value(), hello.error().sentence());
    }

    template <typename T>
    Result<T> ask(msg::Body body) {
        return transport::expect<T>(channel_->call(std::move(body), {}, Deadline::after_ms(30000)),
                                    "trunk");
    }
    void open(std::uint64_t session, std::uint64_t n) {
        REQUIRE(ask<msg::Done>(msg::OpenSession{session, 64, ""}).has_value());
        msg::Step step;
        for (const std::uint32_t id : first_ids(n))
            step.rows.push_back({session, step.rows.size(), id});
        REQUIRE(ask<msg::StepResult>(std::move(step)).has_value());
    }
    Result<msg::SavedSession> save(std::uint64_t session, std::uint64_t n) {
        return ask<msg::SavedSession>(msg::SaveSession{session, "s", first_ids(n)});
    }
    void signal(int number) { program_.signal(number); }
    Ended wait() { return program_.wait(); }

  private:
    Program program_;
    std::unique_ptr<transport::Channel> channel_;
};

}  // namespace

TEST_CASE("a trunk killed while it saves leaves the old session or the new one, and no part") {
    World world;
    const TempDir sessions;
    const char* wanted = std::getenv("K3_SESSION_KILLS");
    const int n_kills = wanted == nullptr ? 40 : std::atoi(wanted);
    const auto n_files = [&sessions] {
        return std::distance(std::filesystem::directory_iterator(sessions.path()), {});
    };
    int n_caught = 0;
    for (int lap = 0; lap <= n_kills; ++lap) {
        Trunk trunk(world, sessions.path());
        if (lap > 0) {
            CHECK(n_files() == 1);  // what was begun is gone
            const auto loaded =
                trunk.ask<msg::LoadedSession>(msg::LoadSession{9, 64, "s", first_ids(41), ""});
            REQUIRE_MESSAGE(loaded.has_value(), loaded.error().sentence());
            CHECK((loaded->position == kShort || loaded->position == kLong));
        }
        if (lap == n_kills) {
            trunk.signal(SIGTERM);
            CHECK(trunk.wait().code == 0);
            break;
        }
        trunk.open(1, kShort);
        trunk.open(2, kLong);
        REQUIRE(trunk.save(1, kShort).has_value());
        std::thread killer([&trunk, lap] {
            std::this_thread::sleep_for(std::chrono::microseconds(300 + 977 * lap % 5000));
            trunk.signal(SIGKILL);
        });
        while (trunk.save(2, kLong).has_value() && trunk.save(1, kShort).has_value()) {
        }
        killer.join();
        CHECK(trunk.wait().code == 128 + SIGKILL);
        n_caught += n_files() > 1 ? 1 : 0;
    }
    MESSAGE(n_caught << " of " << n_kills << " kills were in the middle of a write");
}
