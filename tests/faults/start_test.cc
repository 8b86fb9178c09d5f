// Pipelines that cannot start: one clear sentence, a documented exit code, nothing left behind.

#include <doctest/doctest.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdio>
#include <fstream>
#include <string>

#include "tests/faults/refusal.h"
#include "tests/support/golden.h"
#include "tests/support/pipeline.h"

using namespace k3;
using namespace k3::test;
namespace fs = std::filesystem;

namespace {

const fs::path& tiny() {
    static const fs::path path = golden_dir() / "tiny-k3";
    return path;
}

}  // namespace

TEST_CASE("stages that do not fit together are refused, naming them") {
    World world;
    SUBCASE("two servers on different checkpoints") {
        check_refused(world,
                      pipeline_of(world, tiny(),
                                  "[[experts]]\nname = 'left'\nshare = '0/2'\n[[experts]]\n"
                                  "name = 'right'\nshare = '1/2'\nmodel = '" +
                                      demo_model_dir().string() + "'\n"),
                      3, {"serve different checkpoints (fingerprints", "right"});
    }
    SUBCASE("an expert held by nobody") {
        check_refused(world, pipeline_of(world, tiny(), "[experts]\nshare = 'experts 0-22'\n"), 3,
                      {"expert 23"});
    }
    SUBCASE("a share that cannot be") {
        check_refused(world, pipeline_of(world, tiny(), "[experts]\nshare = 'experts 0-24'\n"), 2,
                      {"experts 0-24"});
    }
    SUBCASE("a setting that does not exist") {
        check_refused(world, pipeline_of(world, tiny(), "[trunk]\nthraeds = 2\n"), 2,
                      {"thraeds", "threads"});
    }
    SUBCASE("an instruction set that does not exist") {
        check_refused(world, pipeline_of(world, tiny(), "[experts]\nenv = { K3_ISA = 'sse9' }\n"),
                      2, {"K3_ISA is 'sse9'", "scalar"});
    }
    SUBCASE("a layer that no trunk stage computes") {
        check_refused(
            world,
            pipeline_of(world, tiny(), "[[trunk]]\nlayers = '0-4'\n[[trunk]]\nlayers = '6-12'\n"),
            3, {"'trunk-0' serves layers 0-4 of 13", "'trunk-1' after it layers 6-12 of 13"});
    }
}

TEST_CASE("what the command itself cannot do is refused before anything starts") {
    World world;
    const std::string k3pipe = built("launcher/k3pipe").string();
    const auto check = [&](const std::string& command, int code,
                           const std::vector<std::string>& parts) {
        CAPTURE(command);
        check_refused_command(world, {"/bin/sh", "-c", command}, code, parts);
    };
    SUBCASE("a directory in the place of a prompt") {
        check(k3pipe + " run -f /", 2, {"cannot read /", "not a readable file"});
        check(k3pipe + " run --messages /", 2, {"cannot read /", "not a readable file"});
    }
    SUBCASE("a prompt without end") {
        check(k3pipe + " run -f /dev/zero", 2, {"/dev/zero", "8388608 bytes"});
    }
    SUBCASE("too few open files") {
        check("ulimit -n 64; exec " + k3pipe + " run -p x", 4, {"64", "128", "ulimit -n"});
        // What starts nothing needs no files.
        const Ended help =
            world.start_program({"/bin/sh", "-c", "ulimit -n 64; exec " + k3pipe + " --help"})
                .wait();
        CHECK_MESSAGE(help.code == 0, help.err);
    }
#ifndef __SANITIZE_ADDRESS__  // which reserves terabytes
    SUBCASE("a small address space") {
        check("ulimit -v 100000; exec " + k3pipe + " run -p x", 4,
              {"102400000 bytes", "4294967296", "ulimit -v"});
        const Ended service =
            world
                .start_program({"/bin/sh", "-c",
                                "ulimit -v 100000; exec " +
                                    built("services/sampler/k3-sampler").string() +
                                    " --listen ipc://" + (world.path() / "s").string()})
                .wait();
        CHECK(service.code == 4);
        for (const char* part : {"102400000 bytes", "1073741824", "ulimit -v"})
            CHECK_MESSAGE(has(service.err, part), service.err);
    }
#endif
    SUBCASE("a full disk under help") {
        check(k3pipe + " --help > /dev/full", 4, {"cannot write to standard output"});
    }
    SUBCASE("a full disk under a plan") {
        check(k3pipe + " plan > /dev/full", 4, {"cannot write to standard output"});
    }
    SUBCASE("a stop string that no text can hold") {
        check(k3pipe + " run -p x --stop \"$(printf '\\377')\"", 2, {"--stop", "0xFF"});
    }
}

TEST_CASE("a standard output that is closed is an error, not an answer") {
    World world;
    const Ended ended =
        world
            .start_program({"/bin/sh", "-c",
                            built("launcher/k3pipe").string() + " run -p The --max-tokens 2 >&-"})
            .wait();
    CHECK(ended.code == 4);
    CHECK(has(ended.err, "cannot write to stdout"));
}

TEST_CASE("a place that is taken is refused, and left to its owner") {
    World world;
    SUBCASE("a socket path") {
        fs::path path = world.path() / "taken.hand";
        Program owner = world.start_program(
            {built("services/sampler/k3-sampler").string(), "--listen", "ipc://" + path.string()});
        Deadline deadline = Deadline::after_ms(10000);
        while (!fs::exists(path) && !deadline.expired()) ::usleep(5000);
        check_refused(
            world,
            pipeline_of(world, tiny(), "[sampler]\nlisten = 'ipc://" + path.string() + "'\n"), 4,
            {path.string(), "taken"});
        CHECK(fs::exists(path));
        owner.signal(SIGTERM);
        CHECK(owner.wait(5000).code == 0);
    }
    SUBCASE("a port") {
        Fd listener(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
        sockaddr_in address = {};
        address.sin_family = AF_INET;
        address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
        REQUIRE(::bind(listener.get(), reinterpret_cast<sockaddr*>(&address), sizeof address) == 0);
        REQUIRE(::listen(listener.get(), 1) == 0);
        socklen_t size = sizeof address;
        ::getsockname(listener.get(), reinterpret_cast<sockaddr*>(&address), &size);
        std::string endpoint = "tcp://127.0.0.1:" + std::to_string(ntohs(address.sin_port));
        check_refused(world, pipeline_of(world, tiny(), "[sampler]\nlisten = '" + endpoint + "'\n"),
                      4, {endpoint, "taken"});
    }
    SUBCASE("the run directory") {
        Ended ended = world.k3pipe(
            {"run", "-p", "x", "-c", pipeline_of(world, tiny()), "--run-dir", "/proc/k3pipe-here"});
        CHECK(ended.code == 4);
        CHECK(has(ended.sentence(), "/proc/k3pipe-here"));
    }
    SUBCASE("an endpoint where nobody answers") {
        check_refused(world,
                      pipeline_of(world, tiny(), "[sampler]\nendpoint = 'ipc:///nonexistent/s'\n"),
                      5, {"nothing answers at ipc:///nonexistent/s", "no such socket file"});
    }
    SUBCASE("a gateway that is not there") {
        Ended ended = world.k3pipe({"run", "-p", "x", "--gateway", "ipc:///nonexistent/g"});
        CHECK(ended.code == 5);
        CHECK(has(ended.sentence(), "no gateway answers at ipc:///nonexistent/g"));
        CHECK(ended.seconds < 3);  // a busy machine; alone it is 10 ms
    }
}

TEST_CASE("what a dead run left is swept at the next start") {
    World world;
    // A run directory whose launcher is gone, and a stale socket in it.
    fs::create_directories(world.base() / "p");
    fs::permissions(world.base(), fs::perms::owner_all);
    std::ofstream(world.base() / "p" / "lock") << "";
    std::ofstream(world.base() / "p" / "sampler.sock") << "";
    fs::create_directories(world.base() / "q");
    std::ofstream(world.base() / "q" / "lock") << "";
    // A segment of a process that ended without unlinking it.
    char run_id[17] = {};
    std::snprintf(run_id, sizeof run_id, "8123%012x", static_cast<unsigned>(::getpid()));
    auto stale = [prefix = "k3-" + std::string(run_id)] {
        for (const auto& entry : fs::directory_iterator("/dev/shm"))
            if (entry.path().filename().string().starts_with(prefix)) return true;
        return false;
    };
    // A pipeline that starts elsewhere on this machine just now sweeps it too: then another one.
    for (int i = 0; i < 5 && !stale(); ++i) {
        Program owner =
            world.start_program({built("services/experts/k3-experts").string(), "--listen",
                                 "ipc://" + (world.path() / "x.hand").string(), "--model",
                                 tiny().string(), "--share", "all", "--run-id", run_id});
        CHECK(owner.says("ready"));
        owner.signal(SIGKILL);
        owner.wait(5000);
    }
    CHECK(stale());
    {
        Pipeline pipeline(world, "p", tiny(), "");
        CHECK_FALSE(stale());
        CHECK_FALSE(fs::exists(world.base() / "q"));
        CHECK(pipeline.program().err().find("swept the run directory of q") != std::string::npos);
    }
    fs::remove(world.path() / "x.hand");
}
