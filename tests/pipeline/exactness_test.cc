// The same bytes of logits, whatever the pipeline looks like: number and shares of expert servers,
// payloads, threads, prefill chunks, batch, cache, trunk stages, stages started by hand or wrapped.

#include <doctest/doctest.h>
#include <signal.h>

#include <cstring>
#include <nlohmann/json.hpp>
#include <string>

#include "common/kernels/kernel_table.h"
#include "tests/support/golden.h"
#include "tests/support/pipeline.h"

using namespace k3;
using namespace k3::test;
using nlohmann::json;

namespace {

const std::vector<std::string> kPrompts = {"p1", "p5", "p12", "p40"};
constexpr std::uint32_t kGreedy = 64;

json manifest() {
    static const json loaded = json::parse(read_file(golden_dir() / "expected" / "manifest.json"));
    return loaded["prompts"];
}

/// Prompt by its text, special tokens recognised; logits of every position and every token.
msg::Submit request_of(const std::string& prompt, std::uint32_t max_tokens) {
    msg::Submit submit = of_text(manifest()[prompt]["text"], max_tokens);
    submit.recognise_specials = true;
    submit.ignore_eos = true;
    submit.want_logits = msg::WantLogits::all;
    return submit;
}

std::vector<msg::Submit> all_requests(std::uint32_t max_tokens) {
    std::vector<msg::Submit> submits;
    for (const std::string& prompt : kPrompts) submits.push_back(request_of(prompt, max_tokens));
    return submits;
}

/// What one plain pipeline computed, checked against the golden data once.
struct Reference {
    std::vector<Answer> answers;

    Reference() {
        World world;
        Pipeline pipeline(world, "reference", golden_dir() / "tiny-k3", "[trunk]\nthreads = 1\n");
        answers = ask_all(pipeline.gateway(), all_requests(kGreedy), 1);
        for (std::size_t i = 0; i < kPrompts.size(); ++i) check(kPrompts[i], answers[i]);
    }

    static void check(const std::string& prompt, const Answer& answer) {
        CAPTURE(prompt);
        REQUIRE_MESSAGE(!answer.error.has_value(), answer.error->sentence());
        CHECK(json(answer.prompt_ids) == manifest()[prompt]["ids"]);
        CHECK(json(answer.ids) == manifest()[prompt]["greedy"]);
        Array golden = load_npy("expected/" + prompt + "/logits.npy");
        std::size_t n = golden.size();
        REQUIRE(answer.logits.size() == (n / 768 + kGreedy) * 768 * 4);
        std::vector<float> actual(n);
        std::memcpy(actual.data(), answer.logits.data(), n * 4);
        CHECK(relative_error(actual, golden.as_f64()) <= 5e-5);
    }
};

const Reference& reference() {
    static const Reference made;
    return made;
}

/// The first `n` generated tokens of `answer` against the reference, byte for byte.
void check_same(const Answer& answer, std::size_t prompt, std::uint32_t n) {
    CAPTURE(kPrompts[prompt]);
    REQUIRE_MESSAGE(!answer.error.has_value(), answer.error->sentence());
    const Answer& expected = reference().answers[prompt];
    REQUIRE(answer.ids.size() == n);
    CHECK(std::equal(answer.ids.begin(), answer.ids.end(), expected.ids.begin()));
    std::size_t bytes = (expected.prompt_ids.size() + n) * 768 * 4;
    REQUIRE(answer.logits.size() == bytes);
    CHECK(std::memcmp(answer.logits.data(), expected.logits.data(), bytes) == 0);
}

/// Each prompt alone, then all at once, so that steps mix prefill and decode rows of all.
void check_pipeline(const Pipeline& pipeline, std::uint32_t n_tokens) {
    std::vector<msg::Submit> submits = all_requests(n_tokens);
    for (std::size_t i : {std::size_t{1}, std::size_t{3}})
        check_same(pipeline.ask(submits[i]), i, n_tokens);
    std::vector<Answer> together = ask_all(pipeline.gateway(), submits, submits.size());
    for (std::size_t i = 0; i < together.size(); ++i) check_same(together[i], i, n_tokens);
}

}  // namespace

TEST_CASE("the shape of the pipeline does not change a bit") {
    reference();
    World world;
    std::string stages;
    std::string extra;
    std::size_t chunk = 0;
    SUBCASE("one server, inline, one row at a time, the smallest cache") {
        // 4 experts at once is what one row needs; 9792 bytes each, slots of whole pages.
        stages = "[experts]\ncache_bytes = '64KiB'\n[trunk]\nthreads = 2\n";
        extra = "payload = 'inline'\n";
        chunk = 1;
    }
    SUBCASE("two servers, shared memory, four threads, chunks of two") {
        stages =
            "[experts]\ncount = 2\nthreads = 2\ncache_bytes = '256KiB'\n[trunk]\nthreads = 4\n";
        chunk = 2;
    }
    SUBCASE("three uneven servers, two trunk stages, chunks of seven") {
        stages =
            "[[experts]]\nshare = 'layers 1-4'\n"
            "[[experts]]\nshare = 'layers 5-12 experts 0-6'\npolicy = 'lru'\ncache_bytes = "
            "'80KiB'\n"
            "[[experts]]\nshare = 'layers 5-12 experts 7-23'\nthreads = 2\n"
            "[trunk]\ncount = 2\nthreads = 1\n";
        chunk = 7;
    }
    SUBCASE("five servers, three trunk stages, inline, every prompt in one step") {
        stages =
            "[experts]\ncount = 5\ncache_bytes = '1MiB'\n"
            "[[trunk]]\nlayers = '0-2'\n[[trunk]]\nlayers = '3-11'\nthreads = 2\n"
            "[[trunk]]\nlayers = '12'\n";
        extra = "payload = 'inline'\n";
        chunk = 40;  // the longest prompt
    }
    SUBCASE("three weighted servers of a placement file, each expert on two of them") {
        stages = "[[experts]]\nweight = 3\n[[experts]]\nweight = 2\n[[experts]]\nweight = 1\n";
        const std::string made =
            world
                .write("made.toml", "[pipeline]\nmodel = '" + (golden_dir() / "tiny-k3").string() +
                                        "'\n" + stages)
                .string();
        const std::string placement = (world.path() / "three.placement").string();
        const Ended ended =
            world.k3pipe({"placement", "-c", made, "--replicas", "2", "--out", placement});
        REQUIRE_MESSAGE(ended.code == 0, ended.err);
        extra = "placement = '" + placement + "'\n";
        chunk = 7;
    }
    stages += "[gateway]\nprefill_chunk = " + std::to_string(chunk) + "\n";
    Pipeline pipeline(world, "shape", golden_dir() / "tiny-k3", stages, extra);
    // That the chunk is what it says, and not cut by another limit.
    std::uint64_t before = pipeline.counter("steps");
    check_same(pipeline.ask(request_of("p40", 1)), 3, 1);
    CHECK(pipeline.counter("steps") - before == (40 + chunk - 1) / chunk);
    check_pipeline(pipeline, 16);
}

TEST_CASE("memory for the trunk's weights does not change a bit") {
    World world;
    std::string stages;
    // tiny-k3 has 0.9 MB of trunk weights; 571,264 bytes is the smallest budget of one stage.
    SUBCASE("the smallest budget, one thread, direct reads") {
        stages = "[trunk]\nthreads = 1\nweights_bytes = 571264\n";
    }
    SUBCASE("some kept, two threads, through the page cache") {
        stages = "[trunk]\nthreads = 2\nweights_bytes = '900KB'\ndirect_reads = 'off'\n";
    }
    SUBCASE("two stages, each streams its own") {
        stages =
            "[[trunk]]\nlayers = '0-5'\nweights_bytes = '600KB'\n"
            "[[trunk]]\nlayers = '6-12'\nweights_bytes = '500KB'\nthreads = 2\n";
    }
    stages += "[gateway]\nprefill_chunk = 7\n";
    Pipeline pipeline(world, "streams", golden_dir() / "tiny-k3", stages);
    check_pipeline(pipeline, 8);
    const launcher::RunRecord record = world.record("streams").value();
    for (const launcher::StageRecord& stage : record.stages)
        if (stage.kind == "trunk") CHECK(pipeline.counter("trunk_read_bytes", stage.name) > 0);
}

TEST_CASE("the instruction set does not change a bit") {
    const kernels::KernelTables available = kernels::available_kernels();
    for (std::size_t i = 0; i < available.count; ++i) {
        const std::string isa = available.tables[i]->isa;
        // The other end of the list: a pipeline of two different boxes.
        const std::string other = available.tables[available.count - 1 - i]->isa;
        CAPTURE(isa);
        World world;
        Pipeline pipeline(world, isa, golden_dir() / "tiny-k3",
                          "[trunk]\nenv = { K3_ISA = '" + isa +
                              "' }\n[[experts]]\nname = 'a'\n"
                              "share = '0/2'\nenv = { K3_ISA = '" +
                              isa +
                              "' }\n[[experts]]\nname = 'b'\n"
                              "share = '1/2'\nenv = { K3_ISA = '" +
                              other + "' }\n");
        check_pipeline(pipeline, 8);
    }
}

TEST_CASE("payloads may differ from stage to stage") {
    World world;
    Pipeline pipeline(world, "mixed", golden_dir() / "tiny-k3",
                      "[trunk]\npayload = 'inline'\n[sampler]\npayload = 'inline'\n");
    check_same(pipeline.ask(request_of("p12", 8)), 2, 8);
}

TEST_CASE("the fast lane to the expert servers does not change a bit, nor does doing without it") {
    const std::string servers = "[experts]\ncount = 2\nspin_us = 20\n";
    for (const bool on : {true, false}) {
        CAPTURE(on);
        World world;
        Pipeline pipeline(
            world, on ? "lane" : "no-lane", golden_dir() / "tiny-k3",
            servers + (on ? "[trunk]\nspin_us = 20\n" : "[trunk]\nfast_lane = 'off'\n"));
        check_pipeline(pipeline, 16);
        const std::uint64_t n_calls = pipeline.counter("expert_calls", "trunk");
        CHECK(n_calls > 0);
        CHECK(pipeline.counter("expert_calls_fast_lane", "trunk") == (on ? n_calls : 0));
    }
}

TEST_CASE("wrapped stages compute the same bytes") {
    World world;
    Pipeline pipeline(world, "wrapped", golden_dir() / "tiny-k3",
                      "[tokenizer]\nwrap = 'env'\n[sampler]\nwrap = 'nice -n 1'\n"
                      "[experts]\nwrap = 'setarch -R'\n[trunk]\nwrap = 'env OMP_NUM_THREADS=1'\n"
                      "[gateway]\nwrap = 'nohup'\n");
    check_same(pipeline.ask(request_of("p12", 8)), 2, 8);
}

TEST_CASE("each stage in turn may be a process started by hand") {
    World world;
    const std::string model = (golden_dir() / "tiny-k3").string();
    auto socket = [&world](const std::string& name) {
        return "ipc://" + (world.path() / (name + ".hand")).string();
    };
    std::string name;
    std::vector<std::string> command;
    std::string others;  // fixed endpoints for the stages that the one by hand calls
    SUBCASE("tokenizer") {
        name = "tokenizer";
        command = {"--model", model};
    }
    SUBCASE("sampler") { name = "sampler"; }
    SUBCASE("experts") {
        name = "experts";
        command = {"--model", model, "--share", "all"};
    }
    SUBCASE("trunk") {
        name = "trunk";
        command = {"--model", model, "--experts", socket("experts")};
        others = "[experts]\nlisten = '" + socket("experts") + "'\n";
    }
    SUBCASE("gateway") {
        name = "gateway";
        command = {"--tokenizer", socket("tokenizer"), "--trunk",      socket("trunk"),
                   "--sampler",   socket("sampler"),   "--model-name", "by-hand"};
        for (const char* stage : {"tokenizer", "trunk", "sampler"})
            others += "[" + std::string(stage) + "]\nlisten = '" + socket(stage) + "'\n";
    }
    std::string endpoint = socket(name);
    command.insert(command.begin(),
                   {built("services/" + name + "/k3-" + name).string(), "--listen", endpoint});
    Program hand = world.start_program(command);
    {
        Pipeline pipeline(world, "by-hand", golden_dir() / "tiny-k3",
                          others + "[" + name + "]\nendpoint = '" + endpoint + "'\n",
                          "attach_timeout_ms = 20000");  // it starts at the same time
        CHECK(pipeline.program().err().find("attached at " + endpoint) != std::string::npos);
        CHECK(pipeline.stage(name).pid == 0);
        CHECK_FALSE(pipeline.stage(name).owned);
        check_same(pipeline.ask(request_of("p12", 8)), 2, 8);
    }
    // The pipeline has ended; what it did not start goes on, until it is told to stop.
    CHECK(::kill(hand.pid(), 0) == 0);
    hand.signal(SIGTERM);
    Ended ended = hand.wait(5000);
    CHECK_MESSAGE(ended.code == 0, ended.err);
    CHECK_FALSE(std::filesystem::exists(endpoint.substr(6)));
}
