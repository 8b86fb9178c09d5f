// Processes that are killed in the middle of their work, and what everybody else does about it.

#include <doctest/doctest.h>
#include <signal.h>

#include <filesystem>
#include <string>
#include <thread>

#include "tests/support/golden.h"
#include "tests/support/pipeline.h"

using namespace k3;
using namespace k3::test;

namespace {

constexpr std::uint32_t kTokens = 300;

msg::Submit long_request() {
    msg::Submit submit = of_text("Once upon a time there was a", kTokens);
    submit.ignore_eos = true;
    return submit;
}

/// A client in a process of its own, so that its stream can be watched while it runs.
Program start_client(const World& world) {
    return world.start({"run", "--attach", "demo", "-p", "Once upon a time there was a",
                        "--max-tokens", std::to_string(kTokens), "--ignore-eos"});
}

/// Returns which process it was.
pid_t kill_stage(const Pipeline& pipeline, const std::string& name) {
    auto pid = static_cast<pid_t>(pipeline.stage(name).pid);
    REQUIRE(pid > 0);
    ::kill(pid, SIGKILL);
    return pid;
}

bool has_segments(pid_t pid) {
    const std::string end = "-" + std::to_string(pid);
    for (const auto& entry : std::filesystem::directory_iterator("/dev/shm")) {
        std::string name = entry.path().filename().string();
        if (name.starts_with("k3-") && name.ends_with(end)) return true;
    }
    return false;
}

}  // namespace

TEST_CASE("a service that is killed in the middle of a generation") {
    World world;
    Pipeline pipeline(world, "demo", demo_model_dir(), "[trunk]\nthreads = 1\n");
    Answer undisturbed = pipeline.ask(long_request());
    REQUIRE_MESSAGE(!undisturbed.error.has_value(), undisturbed.error->sentence());
    REQUIRE(undisturbed.ids.size() == kTokens);
    // The client prints this when most of the text is still to come.
    const std::string beginning = undisturbed.text.substr(0, 40);

    SUBCASE("an expert server: it is restarted and the text comes out identical") {
        Program client = start_client(world);
        REQUIRE_MESSAGE(client.prints(beginning), client.err());
        pid_t killed = kill_stage(pipeline, "experts");
        Ended ended = client.wait();
        CHECK_MESSAGE(ended.code == 0, ended.err);
        CHECK(ended.out == undisturbed.text);
        CHECK(pipeline.complete_again("experts", 1));
        CHECK_FALSE(has_segments(killed));
        CHECK(pipeline.program().says("experts ended with signal 9 (Killed); restart 1 of 5"));
    }
    SUBCASE("another one: an error that names it, and the next request is right") {
        for (const std::string name : {"trunk", "sampler", "tokenizer", "gateway"}) {
            CAPTURE(name);
            Program client = start_client(world);
            REQUIRE_MESSAGE(client.prints(beginning), client.err());
            Clock::time_point killed_at = Clock::now();
            pid_t killed = kill_stage(pipeline, name);
            Ended ended = client.wait();
            CHECK(Clock::now() - killed_at < std::chrono::seconds(5));
            CHECK(ended.code == 5);
            CHECK(has(ended.sentence(), name));
            CHECK(undisturbed.text.starts_with(ended.out));
            CHECK(pipeline.complete_again(name, 1));
            CHECK_FALSE(has_segments(killed));
            Answer next = pipeline.ask(long_request());
            REQUIRE_MESSAGE(!next.error.has_value(), next.error->sentence());
            CHECK(next.ids == undisturbed.ids);
        }
    }
}

TEST_CASE("a service that hears nothing for a moment is waited for, one that is frozen is named") {
    World world;
    Pipeline pipeline(world, "demo", demo_model_dir(), "[trunk]\nthreads = 1\n");
    Answer undisturbed = pipeline.ask(long_request());
    REQUIRE_MESSAGE(!undisturbed.error.has_value(), undisturbed.error->sentence());
    const std::string beginning = undisturbed.text.substr(0, 40);
    auto freeze = [&](const std::string& name) {
        auto pid = static_cast<pid_t>(pipeline.stage(name).pid);
        REQUIRE(pid > 0);
        REQUIRE(::kill(pid, SIGSTOP) == 0);
        return pid;
    };
    SUBCASE("for a moment, as a process without CPU or memory") {
        for (const std::string name : {"trunk", "sampler", "experts"}) {
            CAPTURE(name);
            Program client = start_client(world);
            REQUIRE_MESSAGE(client.prints(beginning), client.err());
            pid_t pid = freeze(name);
            std::this_thread::sleep_for(std::chrono::milliseconds(2500));
            ::kill(pid, SIGCONT);
            Ended ended = client.wait();
            CHECK_MESSAGE(ended.code == 0, ended.err);
            CHECK(ended.out == undisturbed.text);
            CHECK(pipeline.stage(name).restarts == 0);
        }
    }
    SUBCASE("an expert server for longer: its trunk waits, and says for whom") {
        Program client = start_client(world);
        REQUIRE_MESSAGE(client.prints(beginning), client.err());
        const pid_t pid = freeze("experts");
        CHECK(pipeline.program().says("lost experts"));
        CHECK(pipeline.program().says("trunk waits for experts"));
        const Ended status = world.k3pipe({"status", "demo"});
        CHECK(has(status.out, "waiting"));
        CHECK(has(status.out, "waits for experts"));
        CHECK(has(status.out, "its box accepts connections, but the process has not answered"));
        ::kill(pid, SIGCONT);
        CHECK(pipeline.complete_again("experts", 0));
        CHECK(pipeline.program().says("trunk has all it needs again"));
        Ended ended = client.wait();
        CHECK_MESSAGE(ended.code == 0, ended.err);
        CHECK(ended.out == undisturbed.text);
    }
    SUBCASE("for good") {
        Program client = start_client(world);
        REQUIRE_MESSAGE(client.prints(beginning), client.err());
        pid_t pid = freeze("trunk");
        Clock::time_point frozen = Clock::now();
        Ended ended = client.wait();
        CHECK(Clock::now() - frozen < std::chrono::seconds(10));
        CHECK(ended.code == 5);
        CHECK(has(ended.sentence(), "trunk"));
        CHECK(has(ended.sentence(), "silent for 5000 ms"));
        CHECK(undisturbed.text.starts_with(ended.out));
        ::kill(pid, SIGCONT);
        CHECK(pipeline.complete_again("trunk", 0));
        Answer next = pipeline.ask(long_request());
        REQUIRE_MESSAGE(!next.error.has_value(), next.error->sentence());
        CHECK(next.ids == undisturbed.ids);
    }
}

TEST_CASE("a launcher that is killed leaves nothing") {
    World world;
    {
        Pipeline pipeline(world, "doomed", demo_model_dir(),
                          "[experts]\ncount = 2\n[sampler]\nwrap = 'nice -n 1'\n"
                          "[tokenizer]\nwrap = 'nohup'\n");
        // One that hears nothing, and a request that is being computed.
        Program client =
            world.start({"run", "--attach", "-p", "Once", "--max-tokens", "300", "--ignore-eos"});
        CHECK(client.prints(" "));
        ::kill(static_cast<pid_t>(pipeline.stage("sampler").pid), SIGSTOP);
        pipeline.program().signal(SIGKILL);
        pipeline.given_up();
        CHECK(pipeline.program().wait(1000).code == 128 + SIGKILL);
        Ended ended = client.wait(6000);
        CHECK(ended.code == 5);
    }
    // The destructor of the world looks for processes, files and segments, for 5 s at most. The
    // name is free again as soon as they are gone.
    Pipeline next(world, "doomed", demo_model_dir(), "");
    CHECK_FALSE(next.ask(of_text("3 + 4 =", 2)).error.has_value());
}

TEST_CASE("Ctrl-C ends everything in time, whenever it comes") {
    World world;
    SUBCASE("while a request of its own runs") {
        Program run =
            world.start({"run", "-p", "Once upon a time", "--max-tokens", "2000", "--ignore-eos"});
        REQUIRE_MESSAGE(run.prints(" "), run.err());
        run.signal(SIGINT);
        Ended ended = run.wait(5000);
        CHECK(ended.code == 130);
        CHECK(ended.sentence() == "interrupted");
        CHECK_MESSAGE(ended.err.find("warning") == std::string::npos, ended.err);
    }
    SUBCASE("while the stages start") {
        Program run = world.start({"run", "-p", "x"});
        REQUIRE(run.says("starting pipeline"));
        run.signal(SIGINT);
        Ended ended = run.wait(5000);
        CHECK(ended.code == 130);
        CHECK(ended.sentence() == "interrupted");
        CHECK_MESSAGE(ended.err.find("warning") == std::string::npos, ended.err);
    }
    SUBCASE("at a pipeline that answers somebody: stopping it is nobody's trouble") {
        Pipeline pipeline(world, "demo", demo_model_dir(), "");
        Program client = start_client(world);
        REQUIRE_MESSAGE(client.prints(" "), client.err());
        pipeline.program().signal(SIGINT);
        Ended ended = pipeline.program().wait(5000);
        CHECK(ended.code == 0);
        CHECK_MESSAGE(ended.err.find("warning") == std::string::npos, ended.err);
        CHECK(ended.sentence() == "stopped");
        pipeline.given_up();
        Ended answer = client.wait(5000);
        CHECK(answer.code == 5);
        CHECK(has(answer.sentence(), "the gateway is stopping"));
    }
    SUBCASE("with a stage that hears nothing") {
        Pipeline pipeline(world, "demo", demo_model_dir(), "");
        ::kill(static_cast<pid_t>(pipeline.stage("trunk").pid), SIGSTOP);
        pipeline.program().signal(SIGTERM);
        CHECK(pipeline.program().wait(5000).code == 0);
        pipeline.given_up();
    }
    SUBCASE("at an attached client: only its request ends") {
        Pipeline pipeline(world, "demo", demo_model_dir(), "");
        Program client = world.start(
            {"run", "--attach", "-p", "Once upon a time", "--max-tokens", "2000", "--ignore-eos"});
        REQUIRE_MESSAGE(client.prints(" "), client.err());
        client.signal(SIGINT);
        CHECK(client.wait(5000).code == 130);
        CHECK_FALSE(pipeline.ask(of_text("3 + 4 =", 2)).error.has_value());
    }
}
