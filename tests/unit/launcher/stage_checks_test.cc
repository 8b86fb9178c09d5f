// Attached endpoints, and stages that do not fit together.

#include "launcher/stage_checks.h"

#include <doctest/doctest.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/un.h>

#include <cstring>
#include <filesystem>
#include <string>
#include <vector>

#include "tests/unit/launcher/supervisor_bench.h"

using namespace k3;
using namespace k3::launcher;
namespace fs = std::filesystem;
using Bench = test::SupervisorBench;

namespace {

Command command(const std::string& name, const std::vector<std::string>& argv) {
    Command made;
    made.name = name;
    made.argv = argv;
    return made;
}

/// Somebody who accepts connections (the kernel does) and never says a word.
Fd listening_socket(const fs::path& path) {
    Fd fd(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
    sockaddr_un address = {};
    address.sun_family = AF_UNIX;
    std::strncpy(address.sun_path, path.c_str(), sizeof address.sun_path - 1);
    REQUIRE(::bind(fd.get(), reinterpret_cast<sockaddr*>(&address), sizeof address) == 0);
    REQUIRE(::listen(fd.get(), 100) == 0);
    return fd;
}

}  // namespace

TEST_CASE("an attached endpoint is watched, not owned") {
    Bench bench;
    StagePlan& trunk = bench.add_pair();
    SUBCASE("nobody is there, which is known without waiting for an answer") {
        trunk.owned = false;
        bench.options.attach_timeout_ms = 3600'000;
        bench.start();
        Status ready = bench.supervisor().wait_ready();
        REQUIRE_FALSE(ready.has_value());
        CHECK(exit_code(ready.error().code) == kExitUnavailable);
        CHECK(ready.error().message == "nothing answers at " + bench.endpoint("trunk") +
                                           ", the endpoint of trunk: there is no such socket file");
    }
    SUBCASE("somebody accepts connections and never answers") {
        trunk.owned = false;
        bench.options.attach_timeout_ms = 300;
        Fd mute = listening_socket(bench.file("trunk.sock"));
        bench.start();
        Status ready = bench.supervisor().wait_ready();
        REQUIRE_FALSE(ready.has_value());
        CHECK(exit_code(ready.error().code) == kExitUnavailable);
        CHECK(ready.error().message == "nothing answers at " + bench.endpoint("trunk") +
                                           ", the endpoint of trunk, within 300 ms");
    }
    SUBCASE("one that comes a moment after the launcher is met") {
        trunk.owned = false;
        bench.start();
        auto starter = make_local_starter();
        REQUIRE(starter.has_value());
        auto process = (*starter)->start(command("trunk", trunk.argv));
        REQUIRE(process.has_value());
        CHECK(bench.supervisor().wait_ready().has_value());
        (*starter)->signal(*process, SIGTERM);
        CHECK(bench.wait_for([&] { return (*starter)->reap(*process).has_value(); }));
    }
    SUBCASE("it outlives the pipeline") {
        auto starter = make_local_starter();
        REQUIRE(starter.has_value());
        auto process = (*starter)->start(command("trunk", trunk.argv));
        REQUIRE(process.has_value());
        REQUIRE(bench.wait_for([&] { return fs::exists(bench.file("trunk.sock")); }));
        trunk.owned = false;
        bench.start();
        CHECK(bench.supervisor().wait_ready().has_value());
        bench.supervisor().request_stop();
        CHECK(bench.finish().status.has_value());
        CHECK_FALSE((*starter)->reap(*process).has_value());
        (*starter)->signal(*process, SIGTERM);
        CHECK(bench.wait_for([&] { return (*starter)->reap(*process).has_value(); }));
    }
    SUBCASE("it is something else") {
        auto starter = make_local_starter();
        REQUIRE(starter.has_value());
        std::vector<std::string> argv = trunk.argv;
        argv.back() = "sampler";
        auto process = (*starter)->start(command("sampler", argv));
        REQUIRE(process.has_value());
        REQUIRE(bench.wait_for([&] { return fs::exists(bench.file("trunk.sock")); }));
        trunk.owned = false;
        bench.start();
        Status ready = bench.supervisor().wait_ready();
        REQUIRE_FALSE(ready.has_value());
        CHECK(ready.error().message.find("answers for [trunk] and is a sampler") !=
              std::string::npos);
        (*starter)->signal(*process, SIGKILL);
        CHECK(bench.wait_for([&] { return (*starter)->reap(*process).has_value(); }));
    }
}

TEST_CASE("two checkpoints in one pipeline are refused, naming both") {
    Bench bench;
    bench.add(msg::ServiceKind::experts, "experts-0", {"--fingerprint", std::string(32, 'a')});
    bench.add(msg::ServiceKind::experts, "experts-1", {"--fingerprint", std::string(32, 'b')});
    bench.add(msg::ServiceKind::gateway, "gateway");
    bench.start();
    Status ready = bench.supervisor().wait_ready();
    REQUIRE_FALSE(ready.has_value());
    CHECK(exit_code(ready.error().code) == kExitModel);
    CHECK(ready.error().message.find("serve different checkpoints") != std::string::npos);
    CHECK(ready.error().message.find("experts-0") != std::string::npos);
    CHECK(ready.error().message.find("experts-1") != std::string::npos);
}
