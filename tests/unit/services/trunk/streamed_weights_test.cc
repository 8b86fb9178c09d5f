// Weights that are streamed give the bits of weights in memory, at every budget, and failures of
// the disk end a step, never a service and never with other bits.

#include "services/trunk/streamed_weights.h"

#include <doctest/doctest.h>

#include <atomic>
#include <chrono>
#include <filesystem>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "common/kernels/parallel.h"
#include "common/model/token_cost.h"
#include "tests/support/checkpoint_copy.h"
#include "tests/support/golden.h"
#include "tests/support/text.h"
#include "tests/unit/services/trunk/streams.h"

namespace k3::test {

namespace {

using trunk::LayerRange;
using trunk::StreamedWeights;
using Mode = storage::DirectFile::Mode;

}  // namespace

TEST_CASE("every budget gives the same bits, with any piece, thread count and way of reading") {
    const std::vector<float> expected = resident_conversation();
    const std::uint64_t all = all_bytes();
    struct Case {
        std::uint64_t budget;
        std::uint64_t piece_bytes;
        int n_threads;
        Mode mode;
    };
    const std::uint64_t whole = std::uint64_t{1} << 20;  // no matrix is cut
    for (const Case& c :
         {Case{0, 4096, 2, Mode::direct_if_possible}, Case{0, 4096, 1, Mode::buffered},
          Case{0, whole, 2, Mode::buffered}, Case{0, 1, 1, Mode::buffered},  // a row at a time
          Case{all / 2, 4096, 2, Mode::direct_if_possible},
          Case{all * 3 / 4, 8192, 1, Mode::direct_if_possible},
          Case{all - 1, 4096, 2, Mode::buffered}, Case{all, 4096, 2, Mode::direct_if_possible}}) {
        CAPTURE(c.budget);
        CAPTURE(c.piece_bytes);
        Stream stream;
        stream.budget = c.budget;
        stream.piece_bytes = c.piece_bytes;
        stream.mode = c.mode;
        Harness trunk(tiny_model(), harness_options(tiny_model(), stream, c.n_threads));
        CHECK(conversation(trunk) == expected);
        CHECK((stream.counter("trunk_read_bytes") > 0) == (c.budget != all));
    }
    kernels::set_threads(0);
}

TEST_CASE("stages cut anywhere stream their own layers") {
    const std::vector<float> expected = resident_conversation();
    std::vector<std::unique_ptr<Stream>> streams;  // one for each stage
    Harness::Options options;
    options.cuts = {4, 9};
    options.weights = [&](LayerRange range) -> std::unique_ptr<trunk::WeightSource> {
        streams.push_back(std::make_unique<Stream>());
        auto weights = load(tiny_model(), range, *streams.back());
        REQUIRE(weights.has_value());
        return std::move(weights).value();
    };
    {
        Harness trunk(tiny_model(), options);
        CHECK(conversation(trunk) == expected);
    }
    CHECK(streams.size() == 3);
}

TEST_CASE("a token reads what the plan says, to the byte") {
    const model::ModelConfig& config = tiny_model().config;
    const LayerRange range{0, config.n_layers};
    for (const std::uint64_t budget : {std::uint64_t{0}, all_bytes() / 2}) {
        Stream stream;
        stream.budget = budget;
        Harness trunk(tiny_model(), harness_options(tiny_model(), stream));
        trunk.open(1);
        REQUIRE(trunk.step({{1, 5}}, {0}).has_value());
        const std::uint64_t before = stream.counter("trunk_read_bytes");
        for (std::uint32_t i = 0; i < 5; ++i) REQUIRE(trunk.step({{1, 6 + i}}, {0}).has_value());
        const model::WeightPlan plan = plan_of(config, range, budget, stream.piece_bytes);
        const std::uint64_t token = plan.token_bytes(config);
        CHECK(stream.counter("trunk_read_bytes") - before == 5 * token);
        CHECK(stream.counter("trunk_streamed_token_bytes") == token);
        // What the plan keeps, and the vectors, are what is missing from a token's cost.
        std::uint64_t kept = 0;
        for (const model::WeightPiece& piece : plan.pieces) kept += piece.is_kept ? piece.bytes : 0;
        std::uint64_t vectors = 0;
        const auto count = [&](const std::vector<model::TensorSpec>& tensors) {
            for (const model::TensorSpec& tensor : tensors)
                if (tensor.shape.size() != 2 || tensor.shape[0] == 1) vectors += tensor.bytes();
        };
        for (std::uint32_t layer = 0; layer < config.n_layers; ++layer)
            count(model::trunk_layer_tensors(config, layer));
        count(model::model_level_tensors(config));
        CHECK(token == model::token_cost(config).trunk_bytes - kept - vectors);
        CHECK((budget == 0 || kept > 0));
    }
}

TEST_CASE("a steady stream reads no block that it does not use") {
    Stream stream;
    stream.budget = all_bytes() / 2;
    const std::uint64_t piece_blocks =
        2 * storage::kBlockBytes;  // most that is read beside a piece
    std::unique_ptr<StreamedWeights> weights;
    Harness::Options options = harness_options(tiny_model(), stream);
    StreamedWeights* source = nullptr;
    options.weights = [&](LayerRange range) -> std::unique_ptr<trunk::WeightSource> {
        auto loaded = load(tiny_model(), range, stream);
        REQUIRE(loaded.has_value());
        source = loaded->get();
        return std::move(loaded).value();
    };
    Harness trunk(tiny_model(), options);
    trunk.open(1);
    const auto device = [&] {
        source->publish_counters();
        return stream.counter("trunk_read_device_bytes");
    };
    REQUIRE(trunk.step({{1, 5}}, {0}).has_value());
    const std::uint64_t before = device();
    const int n = 10;
    for (std::uint32_t i = 0; i < n; ++i) REQUIRE(trunk.step({{1, 6 + i}}, {0}).has_value());
    const model::ModelConfig& config = tiny_model().config;
    const model::WeightPlan plan =
        plan_of(config, {0, config.n_layers}, stream.budget, stream.piece_bytes);
    std::uint64_t most = plan.token_bytes(config);
    for (const model::WeightPiece& piece : plan.pieces) most += piece.is_kept ? 0 : piece_blocks;
    // The ring may have been emptier before than after.
    CHECK(device() - before <= n * (most + piece_blocks) + plan.ring_bytes);
}

TEST_CASE("a file that is cut while it is streamed fails steps with its name, until it is back") {
    CheckpointCopy copy(golden_dir() / "tiny-k3");
    const model::Model model = model::open_model(copy.path()).value();
    const std::string shard = "model-00002-of-000005.safetensors";
    const std::string bytes = read_file(copy.file(shard));
    Stream stream;
    Harness trunk(model, harness_options(model, stream));
    trunk.open(1);
    const auto expected = trunk.feed(1, {5, 6, 7}, 2);
    copy.truncate(shard, 4096);
    bool failed = false;
    for (int i = 0; i < 2; ++i) {  // what the ring held already is good
        trunk.open(10 + i);
        const auto logits = trunk.step({{10U + static_cast<unsigned>(i), 5}}, {0});
        if (logits.has_value()) continue;
        failed = true;
        CHECK(logits.error().code == ErrorCode::corrupt);
        CHECK(contains(logits.error().message, copy.file(shard).string()));
        CHECK(contains(logits.error().message, "language_model.model.layers."));
        CHECK(contains(logits.error().message, "offset"));
    }
    CHECK(failed);
    // The same file again, under the descriptor that is open.
    std::filesystem::resize_file(copy.file(shard), 0);
    write_file(copy.file(shard), bytes);
    trunk.open(2);
    CHECK(trunk.feed(2, {5, 6, 7}, 2) == expected);
}

TEST_CASE("a step that fails for another reason leaves the stream in order") {
    const std::vector<float> expected = [] {
        Harness trunk(tiny_model());
        trunk.open(1);
        return trunk.feed(1, {5, 6, 7}, 1);
    }();
    Stream stream;
    Harness trunk(tiny_model(), harness_options(tiny_model(), stream));
    for (std::uint32_t layer : {1U, 5U, 12U}) {
        trunk.open(layer);
        trunk.experts().fault = [&](std::uint32_t at) -> Status {
            if (at != layer) return Status::ok();
            return Error{ErrorCode::unavailable, "the expert server is gone", ""};
        };
        CHECK(!trunk.step({{layer, 5}}, {0}).has_value());
        trunk.experts().fault = nullptr;
        trunk.drop(layer);
        trunk.open(layer);
        CHECK(trunk.feed(layer, {5, 6, 7}, 1) == expected);
        trunk.drop(layer);
    }
}

TEST_CASE("errors of single reads end single steps") {
    const std::vector<float> expected = [] {
        Harness trunk(tiny_model());
        trunk.open(1);
        return trunk.feed(1, {5, 6, 7}, 1);
    }();
    Stream stream;
    std::atomic<int> countdown{-1};
    stream.before_request = [&](const storage::ReadSource&, std::uint64_t, std::size_t) -> Status {
        if (countdown.load() < 0 || countdown.fetch_sub(1) != 0) return Status::ok();
        return Error{ErrorCode::io, "cannot read: input/output error", ""};
    };
    Harness trunk(tiny_model(), harness_options(tiny_model(), stream));
    int n_failed = 0;
    for (int after : {0, 1, 7, 50, 120}) {
        trunk.open(1);
        countdown = after;
        for (int i = 0; i < 3; ++i) {
            const auto logits = trunk.step({{1, 5U + static_cast<unsigned>(i)}}, {0});
            if (logits.has_value()) continue;
            ++n_failed;
            CHECK(contains(logits.error().message, "input/output error"));
            break;
        }
        trunk.drop(1);
        trunk.open(1);
        CHECK(trunk.feed(1, {5, 6, 7}, 1) == expected);
        trunk.drop(1);
    }
    CHECK(n_failed == 5);
}

TEST_CASE("a slow disk costs time only, and a step that waits for it ends when it is told to") {
    Harness resident(tiny_model());
    resident.open(1);
    const auto expected = resident.feed(1, {5, 6}, 1);
    Stream stream;
    std::atomic<int> delay_us{200};
    std::atomic<bool> stops{false};
    stream.stopping = [&] { return stops.load(); };
    stream.before_request = [&](const storage::ReadSource&, std::uint64_t, std::size_t) {
        std::this_thread::sleep_for(std::chrono::microseconds(delay_us));
        return Status::ok();
    };
    const auto begin = Clock::now();
    {
        Harness trunk(tiny_model(), harness_options(tiny_model(), stream));
        trunk.open(1);
        CHECK(trunk.feed(1, {5, 6}, 1) == expected);
        delay_us = 200'000;
        stops = true;
        const auto stopped = trunk.step({{1, 7}}, {0});
        REQUIRE(!stopped.has_value());
        CHECK(stopped.error().code == ErrorCode::cancelled);
    }
    CHECK(Clock::now() - begin < std::chrono::seconds(10));
}

TEST_CASE("loading gives up when it is told to, and names what is missing") {
    const model::Model& model = tiny_model();
    Stream stream;
    StreamedWeights::Options options;
    options.plan = plan_of(model.config, {0, 13}, all_bytes() / 2, 4096);
    options.shape = stream.shape;
    std::set<std::string> parts;
    const auto stopped = StreamedWeights::load(
        open_files(model, {0, 13}, stream).value(), model.config, {0, 13}, std::move(options),
        stream.counters, [&](std::uint64_t done, std::uint64_t total, const std::string& what) {
            CHECK(done <= total);
            parts.insert(what);
            return what != "layer 2";
        });
    REQUIRE(!stopped.has_value());
    CHECK(stopped.error().code == ErrorCode::cancelled);
    CHECK(parts ==
          std::set<std::string>{"probing the disk", "vectors", "layer 0", "layer 1", "layer 2"});
}

}  // namespace k3::test
