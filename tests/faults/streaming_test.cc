// Weights that are streamed: what a disk does wrong ends requests with everything a repair needs,
// and the pipeline goes on.

#include <doctest/doctest.h>
#include <signal.h>

#include <filesystem>
#include <string>
#include <vector>

#include "common/pack/pack.h"
#include "tests/faults/refusal.h"
#include "tests/support/checkpoint_copy.h"
#include "tests/support/golden.h"
#include "tests/support/packs.h"
#include "tests/support/pipeline.h"
#include "tests/support/write_over.h"

using namespace k3;
using namespace k3::test;

TEST_CASE("a budget that is too small for any streaming is refused with both numbers") {
    World world;
    check_refused(world,
                  pipeline_of(world, golden_dir() / "tiny-k3", "[trunk]\nweights_bytes = 571263\n"),
                  2, {"571263", "571264", "layers 0-12", "--weights-bytes"});
}

TEST_CASE("weights that are read slowly give the same logits") {
    World world;
    msg::Submit request = of_ids({5, 6, 7}, 4);
    request.want_logits = msg::WantLogits::all;
    std::string expected;
    {
        Pipeline pipeline(world, "plain", golden_dir() / "tiny-k3", "");
        const Answer answer = pipeline.ask(request);
        REQUIRE_MESSAGE(!answer.error.has_value(), answer.error->sentence());
        expected = answer.logits;
    }
    // The address sanitizer wants to be the first library; the slow one does no harm before it.
    Pipeline pipeline(world, "slow", golden_dir() / "tiny-k3",
                      "[trunk]\nweights_bytes = 571264\nenv = { LD_PRELOAD = '" +
                          built("tests/support/libk3_slow_disk.so").string() +
                          "', K3_SLOW_READS_US = '3000', "
                          "ASAN_OPTIONS = 'verify_asan_link_order=0' }\n");
    const Answer answer = pipeline.ask(request);
    REQUIRE_MESSAGE(!answer.error.has_value(), answer.error->sentence());
    CHECK(answer.logits == expected);
    CHECK(answer.seconds > 0.1);  // the reads were slow indeed
}

TEST_CASE("a shard that vanishes under a stream is streamed on; a restart without it is refused") {
    CheckpointCopy copy(golden_dir() / "tiny-k3");
    const std::string shard = "model-00002-of-000005.safetensors";
    const std::string whole = read_file(copy.file(shard));
    World world;
    const std::string stages =
        "[trunk]\nweights_bytes = 571264\n[experts]\ncache_bytes = '16MiB'\n";
    const msg::Submit request = of_ids({5, 6, 7}, 6);
    std::vector<std::uint32_t> expected;
    {
        Pipeline pipeline(world, "vanished", copy.path(), stages);
        const Answer before = pipeline.ask(request);
        REQUIRE_MESSAGE(!before.error.has_value(), before.error->sentence());
        expected = before.ids;
        copy.remove(shard);
        const Answer after = pipeline.ask(request);
        REQUIRE_MESSAGE(!after.error.has_value(), after.error->sentence());
        CHECK(after.ids == expected);
        // Back in its place before the stage begins anew: nothing was remembered of its absence.
        write_file(copy.file(shard), whole);
        REQUIRE(::kill(static_cast<pid_t>(pipeline.stage("trunk").pid), SIGKILL) == 0);
        REQUIRE(pipeline.complete_again("trunk", 1));
        CHECK(pipeline.ask(request).ids == expected);
        // Cut when it begins anew: the pipeline ends and says why.
        std::filesystem::resize_file(copy.file(shard), whole.size() / 2);
        REQUIRE(::kill(static_cast<pid_t>(pipeline.stage("trunk").pid), SIGKILL) == 0);
        pipeline.given_up();
        const Ended ended = pipeline.program().wait();
        CHECK(ended.code == 3);
        CHECK(has(ended.sentence(), shard));
        CHECK(has(ended.sentence(), "truncated"));
    }
    write_file(copy.file(shard), whole);
    Pipeline pipeline(world, "whole", copy.path(), stages);
    CHECK(pipeline.ask(request).ids == expected);
}

TEST_CASE("a shard that is cut while it is streamed fails requests by name until it is whole") {
    CheckpointCopy copy(golden_dir() / "tiny-k3");
    const std::string shard = "model-00002-of-000005.safetensors";
    const std::string whole = read_file(copy.file(shard));
    World world;
    Pipeline pipeline(world, "cut", copy.path(),
                      "[trunk]\nweights_bytes = 571264\n[experts]\ncache_bytes = '16MiB'\n");
    const msg::Submit request = of_ids({5, 6, 7}, 6);
    const Answer before = pipeline.ask(request);
    REQUIRE_MESSAGE(!before.error.has_value(), before.error->sentence());

    std::filesystem::resize_file(copy.file(shard), 4096);
    const Answer cut = pipeline.ask(request);
    REQUIRE(cut.error.has_value());
    CHECK(cut.error->code == ErrorCode::corrupt);
    CHECK(has(cut.error->message, copy.file(shard).string()));
    CHECK(has(cut.error->message, "language_model.model.layers."));
    CHECK(has(cut.error->message, "offset"));

    write_file(copy.file(shard), whole);  // the same file, which is still open
    const Answer after = pipeline.ask(request);
    REQUIRE_MESSAGE(!after.error.has_value(), after.error->sentence());
    CHECK(after.ids == before.ids);
    CHECK(pipeline.stage("trunk").restarts == 0);
}

TEST_CASE(
    "a bit of a trunk pack that flips while it is streamed fails requests until it is right") {
    World world;
    Packs packs(world);
    const std::filesystem::path file = packs.trunk("all");
    const std::string whole = read_file(file);
    const auto pack = pack::Pack::open(file).value();
    Pipeline pipeline(world, "flipped", golden_dir() / "tiny-k3",
                      "[trunk]\nweights_bytes = 571264\npack = '" + file.string() +
                          "'\n[experts]\ncache_bytes = '16MiB'\n");
    const msg::Submit request = of_ids({5, 6, 7}, 6);
    const Answer before = pipeline.ask(request);
    REQUIRE_MESSAGE(!before.error.has_value(), before.error->sentence());

    std::string flipped = whole;
    const pack::Entry& layer = *pack->find({7, 0});
    // Of every block: whichever of them are streamed.
    for (std::uint64_t at = layer.offset; at < layer.offset + layer.bytes; at += 4096)
        flipped[at] = static_cast<char>(flipped[at] ^ 0x04);
    write_over(file, flipped);
    const Answer bad = pipeline.ask(request);
    REQUIRE(bad.error.has_value());
    CHECK(bad.error->code == ErrorCode::corrupt);
    CHECK(has(bad.error->message, file.string() + ": layer 7: the checksum of 4096 bytes at"));
    CHECK(has(bad.error->message, "language_model.model.layers.7."));
    CHECK(bad.ids.empty());

    write_over(file, whole);
    const Answer after = pipeline.ask(request);
    REQUIRE_MESSAGE(!after.error.has_value(), after.error->sentence());
    CHECK(after.ids == before.ids);
    CHECK(pipeline.stage("trunk").restarts == 0);
}
