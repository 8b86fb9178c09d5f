// k3-trunk as a process: what it refuses at start, with which sentence and exit code, and how it
// ends.

#include <doctest/doctest.h>
#include <fcntl.h>
#include <signal.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <string>
#include <vector>

#include "common/base/error.h"
#include "common/transport/channel.h"
#include "tests/support/golden.h"
#include "tests/support/text.h"
#include "tests/unit/services/trunk/fake_expert_server.h"
#include "tests/unit/services/trunk/harness.h"

namespace k3::test {

namespace {

class TrunkProcess {
  public:
    explicit TrunkProcess(std::vector<std::string> arguments) {
        const char* build = std::getenv("K3_BUILD_ROOT");
        REQUIRE(build != nullptr);
        arguments.insert(arguments.begin(), std::string(build) + "/services/trunk/k3-trunk");
        std::vector<char*> argv;
        for (std::string& argument : arguments) argv.push_back(argument.data());
        argv.push_back(nullptr);
        int ends[2];
        REQUIRE(::pipe2(ends, O_CLOEXEC) == 0);
        output_ = ends[0];
        posix_spawn_file_actions_t actions;
        ::posix_spawn_file_actions_init(&actions);
        ::posix_spawn_file_actions_adddup2(&actions, ends[1], 2);
        REQUIRE(::posix_spawn(&pid_, argv[0], &actions, nullptr, argv.data(), environ) == 0);
        ::posix_spawn_file_actions_destroy(&actions);
        ::close(ends[1]);
    }
    ~TrunkProcess() {
        if (pid_ > 0) {
            ::kill(pid_, SIGKILL);
            ::waitpid(pid_, nullptr, 0);
        }
        ::close(output_);
    }
    TrunkProcess(const TrunkProcess&) = delete;
    TrunkProcess& operator=(const TrunkProcess&) = delete;

    void interrupt() const { ::kill(pid_, SIGINT); }
    /// Waits for its end and returns the exit code, or 1000 + the signal.
    int wait() {
        char buffer[4096];
        for (ssize_t n = 0; (n = ::read(output_, buffer, sizeof(buffer))) > 0;)
            log_.append(buffer, static_cast<std::size_t>(n));
        int status = 0;
        ::waitpid(pid_, &status, 0);
        pid_ = -1;
        return WIFEXITED(status) ? WEXITSTATUS(status) : 1000 + WTERMSIG(status);
    }
    const std::string& log() const { return log_; }  // after wait()

  private:
    pid_t pid_ = -1;
    int output_ = -1;
    std::string log_;
};

std::string tiny() { return (golden_dir() / "tiny-k3").string(); }

}  // namespace

TEST_CASE("a start that cannot succeed ends with one sentence and the documented exit code") {
    SocketDirectory sockets;
    const std::string listen = sockets.endpoint("trunk");
    struct Start {
        std::vector<std::string> arguments;
        int exit_code;
        std::string part;
    };
    const std::vector<Start> starts = {
        {{"--model", "/no/such/model"}, kExitModel, "/no/such/model"},
        {{"--model", tiny(), "--layers", "5-13"}, kExitUsage, "layers \"5-13\""},
        {{"--model", tiny()}, kExitModel, "288 of 288 experts are held by nobody"},
        {{"--model", tiny(), "--experts", "carrier-pigeon://x"}, kExitUsage, "carrier-pigeon"},
        {{"--model", tiny(), "--max-step-rows", "0"}, kExitUsage, "max"},
        {{"--model", tiny(), "--layers", "0-0", "--session-bytes", "1000TiB"},
         kExitResources,
         "--session-bytes"},
        {{"--model", tiny(), "--no-such-flag"}, kExitUsage, "no-such-flag"},
        {{}, kExitUsage, "model"},
        {{"--model", tiny(), "--experts", sockets.endpoint("nobody"), "--expert-wait-ms", "100"},
         kExitUnavailable,
         "nobody.sock"},
    };
    for (const Start& start : starts) {
        std::vector<std::string> arguments = start.arguments;
        arguments.insert(arguments.end(), {"--listen", listen});
        TrunkProcess process(arguments);
        CHECK(process.wait() == start.exit_code);
        CAPTURE(process.log());
        CHECK(contains(process.log(), start.part));
    }
}

TEST_CASE("k3-trunk becomes ready, answers, and ends cleanly when interrupted") {
    SocketDirectory sockets;
    FakeExpertServer experts(tiny_model(),
                             {.endpoint = sockets.endpoint("experts"), .use_shm = true});
    TrunkProcess process({"--model", tiny(), "--listen", sockets.endpoint("trunk"), "--experts",
                          sockets.endpoint("experts"), "--run-id", "7e57", "--name", "trunk-9"});
    auto channel =
        transport::Channel::create({.endpoint = sockets.endpoint("trunk"), .peer = "trunk"})
            .value();
    const auto met = channel->hello({}, Deadline::after_ms(60000));
    REQUIRE(met.has_value());
    CHECK(met->name == "trunk-9");
    CHECK(met->fingerprint == tiny_model().fingerprint);
    CHECK(std::get<msg::TrunkFacts>(met->facts).total_layers == 13);
    REQUIRE(channel->call(msg::OpenSession{1, 8}, {}, Deadline::after_ms(60000)).has_value());
    msg::Step step;
    step.rows = {{1, 0, 387}};
    step.want = {0};
    REQUIRE(channel->call(step, {}, Deadline::after_ms(60000)).has_value());
    CHECK(experts.n_calls == 12);
    CHECK(experts.n_shm_calls == 12);

    const std::string segment = "/dev/shm" + met->arena.segment;
    CHECK(std::filesystem::exists(segment));
    process.interrupt();
    CHECK(process.wait() == kExitOk);
    CHECK(!std::filesystem::exists(segment));
    CHECK(!std::filesystem::exists(sockets.endpoint("trunk").substr(6)));
}

}  // namespace k3::test
