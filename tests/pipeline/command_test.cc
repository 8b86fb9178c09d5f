// The verbs of k3pipe around a running pipeline, and the commands that are written in documents.

#include <doctest/doctest.h>
#include <signal.h>

#include <cstdlib>
#include <nlohmann/json.hpp>
#include <string>

#include "tests/support/golden.h"
#include "tests/support/pipeline.h"

using namespace k3;
using namespace k3::test;
using nlohmann::json;

namespace {

std::string replace_all(std::string text, const std::string& from, const std::string& to) {
    for (std::size_t at = text.find(from); at != std::string::npos;
         at = text.find(from, at + to.size()))
        text.replace(at, from.size(), to);
    return text;
}

std::filesystem::path source_root() {
    const char* root = std::getenv("K3_SOURCE_ROOT");
    REQUIRE(root != nullptr);
    return root;
}

/// The contents of all ```sh blocks.
std::vector<std::string> shell_blocks(const std::string& markdown) {
    std::vector<std::string> blocks;
    for (std::size_t at = markdown.find("```sh\n"); at != std::string::npos;
         at = markdown.find("```sh\n", at)) {
        at += 6;
        std::size_t end = markdown.find("```", at);
        blocks.push_back(markdown.substr(at, end - at));
        at = end + 3;
    }
    return blocks;
}

}  // namespace

TEST_CASE("a pipeline is seen by status, refused a second time, and stopped by down") {
    World world;
    Pipeline pipeline(world, "three", golden_dir() / "tiny-k3",
                      "[experts]\ncount = 3\ncache_bytes = '256KiB'\n");
    Ended status = world.k3pipe({"status", "three", "--json"});
    INFO(status.err);
    REQUIRE(status.code == 0);
    json runs = json::parse(status.out);
    REQUIRE(runs.size() == 1);
    CHECK(runs[0]["state"] == "ready");
    CHECK(runs[0]["pid"] == pipeline.program().pid());
    REQUIRE(runs[0]["stages"].size() == 7);
    for (const json& stage : runs[0]["stages"]) {
        CAPTURE(stage.dump());
        CHECK(stage["answers"] == true);
        CHECK(stage["state"] == "ready");
        CHECK(stage["resident_bytes"].get<std::uint64_t>() > 0);
    }

    Ended second = world.k3pipe({"up", "-c", (world.path() / "three.toml").string()});
    CHECK(second.code == 4);
    CHECK(has(second.sentence(),
              "pipeline 'three' already runs (pid " + std::to_string(pipeline.program().pid())));
    CHECK(has(second.sentence(), "k3pipe down three"));

    Ended down = world.k3pipe({"down"});
    CHECK(down.code == 0);
    CHECK(down.seconds < 5);
    Ended ended = pipeline.program().wait(5000);
    CHECK(ended.code == 0);
    pipeline.given_up();
    CHECK(world.k3pipe({"status", "three"}).code == 5);
    CHECK(has(world.k3pipe({"down", "three"}).sentence(), "no pipeline 'three' runs"));
}

TEST_CASE("run starts a pipeline of its own beside one that runs") {
    World world;
    Pipeline pipeline(world, "demo", demo_model_dir(), "");
    Ended own = world.k3pipe({"run", "-p", "The day after Monday is", "--max-tokens", "2"});
    CHECK(own.code == 0);
    CHECK(own.out == " Tuesday.");
    CHECK(has(own.err, "starting pipeline 'demo-"));
    Ended attached = world.k3pipe({"run", "--gateway", pipeline.gateway(), "-f",
                                   world.write("p.txt", "3 + 4 =").string(), "--max-tokens", "8",
                                   "--stop", "\n"});
    CHECK(attached.code == 0);
    CHECK(attached.out == " 7");
    CHECK(has(attached.err, "stop string"));
}

TEST_CASE("logits go to a file, sampling follows its seed") {
    World world;
    Pipeline pipeline(world, "demo", demo_model_dir(), "");
    std::string file = (world.path() / "l.toml").string();  // any name will do
    Ended greedy = world.k3pipe({"run", "--attach", "-p", "The capital of France is",
                                 "--max-tokens", "3", "--logits-out", file, "--prompt-logits"});
    INFO(greedy.err);
    CHECK(greedy.code == 0);
    std::string bytes = read_file(file);
    CHECK(bytes.size() == 128 + (5 + 3) * 2304 * 4);
    CHECK(has(bytes.substr(0, 128), "(8, 2304)"));
    auto sample = [&world](const char* seed) {
        return world
            .k3pipe({"run", "--attach", "-p", "Once upon a time", "--max-tokens", "12",
                     "--temperature", "1.5", "--seed", seed})
            .out;
    };
    CHECK(sample("1") == sample("1"));
    CHECK(sample("1") != sample("2"));
}

TEST_CASE("plan prints what would start and the bytes it needs") {
    World world;
    Ended plan = world.k3pipe({"plan"});
    INFO(plan.err);
    CHECK(plan.code == 0);
    CHECK(has(plan.out, "pipeline 'demo'"));
    CHECK(has(plan.out, "k3-experts --listen ipc://"));
    CHECK(has(plan.out, "share 'all': 192 experts"));
    CHECK(has(plan.out, "read per token, at most"));
    CHECK(has(plan.out, "; 2 threads on core"));
    for (const char* config : {"tiny.toml", "tiny-three-experts.toml", "swap-a-stage.toml"})
        CHECK(world.k3pipe({"plan", "-c", (source_root() / "configs" / config).string()}).code ==
              0);
}

TEST_CASE("pack writes a file and verify reads it; both refuse what cannot be") {
    World world;
    const std::string model = (golden_dir() / "tiny-k3").string();
    const std::string file = (world.path() / "trunk.k3pack").string();
    Ended packed = world.k3pipe({"pack", "trunk", model, file, "--layers", "0-3"});
    INFO(packed.err);
    CHECK(packed.code == 0);
    CHECK(has(packed.out, "trunk.k3pack: layers 0-3 of the trunk, "));
    CHECK(packed.err.empty());
    Ended again = world.k3pipe({"pack", "trunk", model, file});
    CHECK(again.code == 2);
    CHECK(has(again.sentence(), "trunk.k3pack already exists"));
    const std::string experts = (world.path() / "experts.k3pack").string();
    CHECK(world.k3pipe({"pack", "experts", model, experts, "--list", "layers 40"}).code == 2);
    CHECK(world.k3pipe({"pack", "experts", "/nonexistent", experts, "--share", "all"}).code == 3);
    CHECK(world.k3pipe({"pack", "experts", model, "/nonexistent/p", "--share", "all"}).code == 4);
    CHECK_FALSE(std::filesystem::exists(experts));
    CHECK(world.k3pipe({"pack", "experts", model, experts, "--share", "all"}).code == 0);
    // 288 records of 9,792 bytes in blocks of 4,096, header and table.
    CHECK(std::filesystem::file_size(experts) == 4096 * (288 * 3 + 1 + 4));

    Ended verified = world.k3pipe({"verify", experts});
    CHECK(verified.code == 0);
    CHECK(has(verified.out, "experts pack of 288 entries"));
    CheckpointCopy copy(golden_dir() / "tiny-k3");
    CHECK(world.k3pipe({"verify", copy.path().string(), "--record"}).code == 0);
    CHECK(world.k3pipe({"verify", copy.path().string(), "--record"}).code == 2);
    copy.flip_byte("model-00002-of-000005.safetensors", 5000);
    Ended damaged = world.k3pipe({"verify", copy.path().string()});
    CHECK(damaged.code == 3);
    CHECK(has(damaged.sentence(), "model-00002-of-000005.safetensors bytes 0 to "));
    CHECK(world.k3pipe({"verify", experts, "--record"}).code == 2);
    for (const char* name : {"trunk.k3pack", "experts.k3pack"})
        std::filesystem::remove(world.path() / name);
}

TEST_CASE("idle compute threads of a service that is started by hand sleep, unless told not to") {
    World world;
    auto environment_with = [&world](std::vector<std::string> variables) {
        std::vector<std::string> argv = {"/usr/bin/env", "-u", "OMP_WAIT_POLICY", "-u",
                                         "GOMP_SPINCOUNT"};
        argv.insert(argv.end(), variables.begin(), variables.end());
        for (const std::string& word :
             {built("services/experts/k3-experts").string(), std::string("--listen"),
              "ipc://" + (world.path() / "e.hand").string(), std::string("--model"),
              (golden_dir() / "tiny-k3").string()})
            argv.push_back(word);
        Program service = world.start_program(argv);
        REQUIRE_MESSAGE(service.says("ready"), service.err());
        std::string process = "/proc/" + std::to_string(service.pid());
        CHECK(read_file(process + "/comm") == "k3-experts\n");
        std::string environment = read_file(process + "/environ");
        service.signal(SIGTERM);
        CHECK(service.wait(5000).code == 0);
        return environment;
    };
    const std::string ours = environment_with({});
    CHECK(has(ours, "OMP_WAIT_POLICY=passive"));
    CHECK(has(ours, "GOMP_SPINCOUNT=3000"));
    const std::string chosen = environment_with({"OMP_WAIT_POLICY=active"});
    CHECK(has(chosen, "OMP_WAIT_POLICY=active"));
    CHECK_FALSE(has(chosen, "GOMP_SPINCOUNT"));
    CHECK_FALSE(has(environment_with({"GOMP_SPINCOUNT=9"}), "OMP_WAIT_POLICY"));
}

TEST_CASE("every stage starts by hand as the document says") {
    World world;
    std::string markdown = read_file(source_root() / "configs" / "by-hand.md");
    markdown = replace_all(markdown, "/tmp/k3-by-hand", world.path().string());
    markdown = replace_all(markdown, "build/", built("").string());
    std::vector<std::string> blocks = shell_blocks(markdown);
    REQUIRE(blocks.size() == 7);
    auto shell = [&](const std::string& block) {
        return world.start_program(
            {"/bin/sh", "-c", "cd '" + source_root().string() + "' && exec " + block});
    };
    CHECK(shell(blocks[0]).wait().code == 0);
    std::vector<Program> stages;
    for (std::size_t i = 1; i + 1 < blocks.size(); ++i) stages.push_back(shell(blocks[i]));
    REQUIRE_MESSAGE(stages.back().says("ready"), stages.back().err());
    Ended answer = shell(blocks.back()).wait();
    INFO(answer.err);
    CHECK(answer.code == 0);
    CHECK(answer.out.starts_with(" Paris."));
    for (Program& stage : stages) stage.signal(SIGINT);
    for (Program& stage : stages) CHECK(stage.wait(5000).code == 0);
}
