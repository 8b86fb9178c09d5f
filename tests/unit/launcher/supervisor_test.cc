#include "launcher/supervisor.h"

#include <doctest/doctest.h>
#include <fmt/format.h>
#include <signal.h>

#include <filesystem>
#include <fstream>
#include <set>
#include <string>
#include <thread>

#include "launcher/stop_sequence.h"
#include "tests/unit/launcher/supervisor_bench.h"

using namespace k3;
using namespace k3::launcher;
namespace fs = std::filesystem;
using Bench = test::SupervisorBench;

namespace {

pid_t child_of(std::int64_t pid) {
    pid_t child = 0;
    std::ifstream(fmt::format("/proc/{0}/task/{0}/children", pid)) >> child;
    REQUIRE(child > 0);
    return child;
}

bool is_gone(std::int64_t pid) { return ::kill(static_cast<pid_t>(pid), 0) != 0; }

}  // namespace

TEST_CASE("a pipeline is ready when every stage says so, and stops when asked") {
    Bench bench;
    bench.add_pair({"--load-ms", "300"});
    bench.start();
    CHECK(bench.supervisor().wait_ready().has_value());
    CHECK(bench.wait_for([&] { return bench.state() == "ready"; }));
    std::int64_t trunk = bench.stage("trunk").pid;
    CHECK(trunk > 0);
    bench.supervisor().request_stop();
    Outcome outcome = bench.finish();
    CHECK(outcome.status.has_value());
    CHECK(is_gone(trunk));
    CHECK_FALSE(fs::exists(bench.file("trunk.sock")));
}

TEST_CASE("a stage that was killed is started again, and the pipeline is complete again") {
    Bench bench;
    bench.add_pair();
    bench.start();
    REQUIRE(bench.supervisor().wait_ready().has_value());
    std::int64_t first = bench.stage("trunk").pid;
    ::kill(static_cast<pid_t>(first), SIGKILL);
    CHECK(bench.wait_for([&] {
        StageRecord trunk = bench.stage("trunk");
        return trunk.restarts == 1 && trunk.state == "ready" && bench.state() == "ready";
    }));
    CHECK(bench.stage("trunk").pid != first);
    CHECK(bench.stage("gateway").restarts == 0);
}

TEST_CASE("the shared memory of a killed stage is removed while the others keep theirs") {
    Bench bench;
    bench.add(msg::ServiceKind::experts, "other", {"--arena"});
    StagePlan& trunk = bench.add(msg::ServiceKind::trunk, "trunk", {"--arena"});
    bool wrapped = false;
    SUBCASE("a stage alone") {}
    SUBCASE("a stage behind a wrapper, whose process is not the one that was started") {
        wrapped = true;
        trunk.wrapped = true;
        trunk.argv.insert(trunk.argv.begin(), {"/bin/sh", "-c", "\"$0\" \"$@\"; exit $?"});
    }
    bench.add(msg::ServiceKind::gateway, "gateway");
    bench.start();
    REQUIRE(bench.supervisor().wait_ready().has_value());
    std::set<std::string> before = bench.segments();
    REQUIRE(before.size() == 2);
    pid_t owner = wrapped ? child_of(bench.stage("trunk").pid) : pid_t(bench.stage("trunk").pid);
    REQUIRE(before.contains(fmt::format("trunk-{}", owner)));
    ::kill(owner, SIGKILL);
    CHECK(bench.wait_for([&] { return bench.stage("trunk").restarts == 1; }));
    CHECK(bench.wait_for([&] { return bench.state() == "ready"; }));
    std::set<std::string> after = bench.segments();
    CHECK(after.size() == 2);
    CHECK_FALSE(after.contains(fmt::format("trunk-{}", owner)));
    CHECK(after.contains(fmt::format("other-{}", bench.stage("other").pid)));
}

TEST_CASE("bad settings and a bad model end the pipeline with the service's own sentence") {
    Bench bench;
    int code = 0;
    std::string expected = "trunk: the shelf is empty; fill it";
    SUBCASE("model") {
        bench.add_pair({"--exit-at-start", "3"});
        code = 3;
    }
    SUBCASE("in use") {
        bench.add_pair({"--exit-at-start", "4"});
        code = 4;
    }
    SUBCASE("settings, said without a log") {
        bench.add_pair({"--complain"});
        code = 2;
        expected = "trunk: fake_service: cannot be started like this";
    }
    SUBCASE("settings of a table in a file") {
        bench.add_pair({"--complain"}).where = "/some/file.toml:7";
        code = 2;
        expected = "/some/file.toml:7: trunk: fake_service: cannot be started like this";
    }
    bench.start();
    Status ready = bench.supervisor().wait_ready();
    REQUIRE_FALSE(ready.has_value());
    Outcome outcome = bench.finish();
    REQUIRE_FALSE(outcome.status.has_value());
    CHECK(outcome.status.error().sentence() == expected);
    CHECK(exit_code(outcome.status.error().code) == code);
}

TEST_CASE("a stage that fails at first is retried, and one that always fails is given up") {
    Bench bench;
    bench.options.max_restarts = 2;
    std::string failures;
    bool recovers = false;
    SUBCASE("recovers") {
        failures = "2";
        recovers = true;
    }
    SUBCASE("never does") { failures = "100"; }
    bench.add_pair({"--fail-first", failures, "--lives", bench.file("lives").string()});
    bench.start();
    Status ready = bench.supervisor().wait_ready();
    CHECK(ready.has_value() == recovers);
    if (recovers) {
        CHECK(bench.wait_for([&] { return bench.stage("trunk").restarts == 2; }));
        return;
    }
    CHECK(ready.error().message.find("trunk: ended with exit code 1") == 0);
    CHECK(ready.error().message.find("after 2 restarts within 60 s") != std::string::npos);
}

TEST_CASE("a stage that makes no progress is given up, one that does is waited for") {
    Bench bench;
    // Long enough for a busy machine to start a process, shorter than the loading takes.
    bench.options.start_timeout_ms = 2000;
    SUBCASE("progress") {
        bench.add_pair({"--load-ms", "4000"});
        bench.start();
        CHECK(bench.supervisor().wait_ready().has_value());
    }
    SUBCASE("none") {
        // What follows the command are its own parameters, so the flags of a service do not hurt.
        bench.add_pair().argv = {"/bin/sh", "-c", "sleep 60"};
        bench.start();
        Status ready = bench.supervisor().wait_ready();
        REQUIRE_FALSE(ready.has_value());
        CHECK(ready.error().code == ErrorCode::deadline_exceeded);
        CHECK(ready.error().message.find("trunk is not ready and made no progress") == 0);
    }
}

TEST_CASE("a stage that ignores the request to stop is killed") {
    Bench bench;
    bench.options.stop_grace_ms = 300;
    bench.add_pair({"--deaf"});
    bench.start();
    REQUIRE(bench.supervisor().wait_ready().has_value());
    CHECK(bench.wait_for([&] { return bench.state() == "ready"; }));
    std::int64_t trunk = bench.stage("trunk").pid;
    bench.supervisor().request_stop();
    CHECK(bench.finish().status.has_value());
    CHECK(is_gone(trunk));
}

TEST_CASE("stages are stopped in the order of who calls whom") {
    Bench bench;
    std::string file = bench.file("words").string();
    std::string expected = "gateway trunk experts ";
    bench.add(msg::ServiceKind::experts, "experts", {"--last-words", file});
    SUBCASE("all of them hear") {
        bench.add(msg::ServiceKind::trunk, "trunk", {"--last-words", file});
    }
    SUBCASE("one that does not hear delays the next, and does not save it") {
        bench.add(msg::ServiceKind::trunk, "trunk", {"--deaf"});
        expected = "gateway experts ";
    }
    bench.add(msg::ServiceKind::gateway, "gateway", {"--last-words", file});
    bench.options.stop_grace_ms = 3 * StopSequence::kWaveMs;
    bench.start();
    REQUIRE(bench.supervisor().wait_ready().has_value());
    bench.supervisor().request_stop();
    CHECK(bench.finish().status.has_value());
    CHECK(test::read_file(file) == expected);
}

TEST_CASE("a stopped stage is lost, then ready again, and nobody kills it meanwhile") {
    Bench bench;
    bench.options.silence_ms = 900;
    bench.options.hang_ms = 1100;
    bench.add_pair();
    bench.start();
    REQUIRE(bench.supervisor().wait_ready().has_value());
    CHECK(bench.wait_for([&] { return bench.state() == "ready"; }));
    std::int64_t trunk = bench.stage("trunk").pid;
    ::kill(static_cast<pid_t>(trunk), SIGSTOP);
    CHECK(bench.wait_for([&] { return bench.stage("trunk").state == "lost"; }));
    CHECK(bench.state() == "degraded");
    std::this_thread::sleep_for(std::chrono::milliseconds(400));  // longer than hang_ms in all
    ::kill(static_cast<pid_t>(trunk), SIGCONT);
    CHECK(bench.wait_for([&] { return bench.stage("trunk").state == "ready"; }));
    CHECK(bench.stage("trunk").pid == trunk);
}

TEST_CASE("a program that cannot be executed is refused with the reason") {
    Bench bench;
    test::write_file(bench.file("not-a-program"), "hello");
    fs::permissions(bench.file("not-a-program"), fs::perms::owner_all);
    bench.add_pair().argv = {bench.file("not-a-program").string()};
    bench.start();
    Status ready = bench.supervisor().wait_ready();
    REQUIRE_FALSE(ready.has_value());
    CHECK(ready.error().message.find("not-a-program: Exec format error") != std::string::npos);
    CHECK(exit_code(ready.error().code) == kExitUsage);
}
