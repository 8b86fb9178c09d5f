// Boxes in trouble while somebody waits for an answer: which way is told apart, over real networks,
// ssh and processes. What the answer is worth then is tested in boxes_test.cc.

#include <doctest/doctest.h>
#include <signal.h>

#include <filesystem>
#include <string>
#include <thread>

#include "tests/support/boxes.h"
#include "tests/support/golden.h"
#include "tests/support/pipeline.h"

using namespace k3;
using namespace k3::test;

namespace {

constexpr std::int64_t kCleanMs = 10000;  // in which every box must be rid of a pipeline

std::string hosts(std::size_t n) {
    std::string tables;
    for (std::size_t i = 0; i < n; ++i)
        tables += "[hosts.box" + std::to_string(i) + "]\nbinary = '" +
                  built("launcher/k3pipe").string() + "'\n";
    return tables;
}

Program start_client(const World& world) {
    return world.start({"run", "--attach", "demo", "-p", "Once upon a time there was a",
                        "--max-tokens", "300", "--ignore-eos"});
}

bool is_ready_again(const World& world) {
    const Deadline deadline = Deadline::after_ms(30000);
    while (!deadline.expired()) {
        if (world.record("demo")->state == "ready") return true;
        std::this_thread::sleep_for(std::chrono::milliseconds(20));
    }
    return false;
}

}  // namespace

TEST_CASE("a box whose server is stopped, one that cannot be reached, and one whose server died" *
          doctest::skip(!boxes_can_be_made())) {
    World world;
    Boxes boxes(world.path(), 1);
    {
        Pipeline pipeline(world, "demo", demo_model_dir(),
                          "[experts]\nhost = 'box0'\n"
                          "[trunk]\nthreads = 1\nexpert_wait_ms = 500\n" +
                              hosts(1),
                          boxes.pipeline_keys() + "max_restarts = 50\n");
        auto check_named = [&](const std::string& what) {
            Program client = start_client(world);
            CHECK_MESSAGE(pipeline.program().says(what), pipeline.program().err());
            CHECK_MESSAGE(pipeline.program().says("trunk waits for experts"),
                          pipeline.program().err());
            const Ended ended = client.wait();
            CHECK(ended.code == 5);
            CHECK_MESSAGE(has(ended.sentence(), what), ended.sentence());
        };
        boxes.run(0, "pkill -STOP -x k3-experts");
        check_named("is wedged: its box accepts connections, but the process has not answered");
        boxes.run(0, "pkill -CONT -x k3-experts");
        CHECK(is_ready_again(world));
        boxes.pull_cable(0);
        check_named("is unreachable: nothing has come back from its box");
        boxes.plug_in(0);
        CHECK(is_ready_again(world));
        boxes.run(0, "pkill -KILL -x k3-experts");
        CHECK(pipeline.program().says("experts ended with signal 9 (Killed); restart"));
        CHECK(is_ready_again(world));
    }
    CHECK(boxes.all_clean(kCleanMs));
}
