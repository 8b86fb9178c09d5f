// Weights streamed from a trunk pack: the bits of the checkpoint, at every budget, and a byte that
// is not what was packed never gets into a step.

#include <doctest/doctest.h>

#include <filesystem>
#include <string>
#include <vector>

#include "common/kernels/parallel.h"
#include "common/pack/make_pack.h"
#include "common/pack/packed_model.h"
#include "tests/support/checkpoint_copy.h"
#include "tests/support/golden.h"
#include "tests/support/text.h"
#include "tests/unit/services/trunk/streams.h"

namespace k3::test {

namespace {

using trunk::LayerRange;
using Mode = storage::DirectFile::Mode;

bool go_on(std::uint64_t /*done*/, std::uint64_t /*total*/) { return true; }

/// A pack of tiny-k3's trunk, or of some of its layers.
struct PackFile {
    TempDir temp;
    std::filesystem::path path = temp.path() / "trunk.k3pack";

    explicit PackFile(LayerRange range = {0, tiny_model().config.n_layers}) {
        REQUIRE(
            pack::make_trunk_pack(tiny_model(), range.first, range.count, path, go_on).has_value());
    }
    std::shared_ptr<const pack::Pack> open(Mode mode = Mode::direct_if_possible) const {
        return pack::Pack::open(path, pack::Kind::trunk, mode).value();
    }
    /// In place: whoever has the file open sees it.
    void flip_bit(std::uint64_t offset) const {
        std::string bytes = read_file(path);
        bytes[offset] = static_cast<char>(bytes[offset] ^ 0x20);
        write_file(path, bytes);
    }
};

}  // namespace

TEST_CASE("a stream from a pack gives the bits of the checkpoint at every budget") {
    const std::vector<float> expected = resident_conversation();
    const PackFile file;
    const std::uint64_t all = all_bytes();
    struct Case {
        std::uint64_t budget;
        std::uint64_t piece_bytes;
        int n_threads;
        Mode mode;
    };
    for (const Case& c : {Case{0, 4096, 2, Mode::direct_if_possible},
                          Case{0, 1, 1, Mode::buffered},  // a row at a time
                          Case{0, std::uint64_t{1} << 20, 2, Mode::direct_if_possible},
                          Case{all / 2, 4096, 2, Mode::buffered},
                          Case{all * 3 / 4, 8192, 1, Mode::direct_if_possible},
                          Case{all - 1, 4096, 2, Mode::direct_if_possible}}) {
        CAPTURE(c.budget);
        CAPTURE(c.piece_bytes);
        Stream stream;
        stream.budget = c.budget;
        stream.piece_bytes = c.piece_bytes;
        stream.pack = file.open(c.mode);
        Harness trunk(tiny_model(), harness_options(tiny_model(), stream, c.n_threads));
        CHECK(conversation(trunk) == expected);
        CHECK(stream.counter("trunk_read_bytes") > 0);
    }
    kernels::set_threads(0);
}

TEST_CASE("a token reads from a pack what the plan says, and at most two units around a piece") {
    const model::ModelConfig& config = tiny_model().config;
    const LayerRange range{0, config.n_layers};
    const PackFile file;
    for (const std::uint64_t budget : {std::uint64_t{0}, all_bytes() / 2}) {
        Stream stream;
        stream.budget = budget;
        stream.pack = file.open();
        trunk::StreamedWeights* source = nullptr;
        Harness::Options options = harness_options(tiny_model(), stream);
        options.weights = [&](LayerRange layers) -> std::unique_ptr<trunk::WeightSource> {
            auto loaded = load(tiny_model(), layers, stream).value();
            source = loaded.get();
            return loaded;
        };
        Harness trunk(tiny_model(), options);
        trunk.open(1);
        const auto device = [&] {
            source->publish_counters();
            return stream.counter("trunk_read_device_bytes");
        };
        REQUIRE(trunk.step({{1, 5}}, {0}).has_value());
        const std::uint64_t before = stream.counter("trunk_read_bytes");
        const std::uint64_t device_before = device();
        const std::uint64_t n = 5;
        for (std::uint32_t i = 0; i < n; ++i) REQUIRE(trunk.step({{1, 6 + i}}, {0}).has_value());
        const model::WeightPlan plan = plan_of(config, range, budget, stream.piece_bytes);
        CHECK(stream.counter("trunk_read_bytes") - before == n * plan.token_bytes(config));
        CHECK(stream.counter("trunk_streamed_token_bytes") == plan.token_bytes(config));
        std::uint64_t most = plan.token_bytes(config) + 2 * plan.units.embedding;
        for (const model::WeightPiece& piece : plan.pieces)
            most += piece.is_kept ? 0 : 2 * plan.units.matrices;
        // The ring may have been emptier before than after.
        CHECK(device() - device_before <= n * most + plan.ring_bytes);
    }
}

TEST_CASE(
    "a flipped bit in a run that is streamed fails the step, names the place and is not kept") {
    const PackFile file;
    const std::string good = read_file(file.path);
    const auto pack = file.open();
    Stream stream;
    stream.pack = pack;
    Harness trunk(tiny_model(), harness_options(tiny_model(), stream));
    trunk.open(1);
    const auto expected = trunk.feed(1, {5, 6, 7}, 2);
    std::uint64_t session = 2;
    for (const pack::TrunkRun& run :
         pack::trunk_runs(tiny_model().config, 0, tiny_model().config.n_layers)) {
        const pack::Entry& entry = *pack->find(run.key());
        const std::string name = pack->name_of(run.key());
        CAPTURE(name);
        // In the middle of its largest matrix; of the embedding, in the row of token 5.
        const auto* largest = &run.tensors().front();
        for (const pack::PlacedTensor& tensor : run.tensors())
            if (tensor.spec.bytes() > largest->spec.bytes()) largest = &tensor;
        const bool is_embedding = largest->spec.name == model::kEmbeddingTensor;
        const std::uint64_t row_bytes = largest->spec.bytes() / largest->spec.shape[0];
        const std::uint64_t at =
            largest->offset + (is_embedding ? 5 * row_bytes : largest->spec.bytes() / 2);
        file.flip_bit(entry.offset + at);
        Error error{ErrorCode::internal, "no step failed", ""};
        for (int i = 0; i < 2; ++i) {  // what the ring holds already is good
            trunk.open(++session);
            const auto logits = trunk.step({{session, 5}}, {0});
            if (!logits.has_value()) error = logits.error();
        }
        CHECK(error.code == ErrorCode::corrupt);
        CHECK(contains(error.message, file.path.string() + ": " + name + ": the checksum of"));
        CHECK(contains(error.message, is_embedding ? "embedding of token 5" : largest->spec.name));
        write_file(file.path, good);
        trunk.open(++session);
        CHECK(trunk.feed(session, {5, 6, 7}, 2) == expected);
    }
}

TEST_CASE("a flipped bit in what is kept ends the start") {
    const PackFile file;
    const auto pack = file.open();
    const pack::Entry& layer = *pack->find({3, 0});
    for (const std::uint64_t at : {std::uint64_t{0}, layer.bytes / 2, layer.bytes - 1}) {
        file.flip_bit(layer.offset + at);
        Stream stream;
        stream.budget = all_bytes() - 1;
        stream.pack = pack;
        const auto loaded = load(tiny_model(), {0, 13}, stream);
        REQUIRE_FALSE(loaded.has_value());
        CHECK(loaded.error().code == ErrorCode::corrupt);
        CHECK(contains(loaded.error().message, "layer 3: the checksum of 4096 bytes"));
        file.flip_bit(layer.offset + at);
    }
}

TEST_CASE("a pack that is cut while it is streamed fails steps with its name, until it is back") {
    const PackFile file;
    const std::string good = read_file(file.path);
    Stream stream;
    stream.pack = file.open();
    Harness trunk(tiny_model(), harness_options(tiny_model(), stream));
    trunk.open(1);
    const auto expected = trunk.feed(1, {5, 6, 7}, 2);
    std::filesystem::resize_file(file.path, stream.pack->find({4, 0})->offset);
    Error error{ErrorCode::internal, "no step failed", ""};
    for (std::uint64_t i = 2; i < 4; ++i) {
        trunk.open(i);
        const auto logits = trunk.step({{i, 5}}, {0});
        if (!logits.has_value()) error = logits.error();
    }
    CHECK(error.code == ErrorCode::corrupt);
    CHECK(contains(error.message, file.path.string()));
    CHECK(contains(error.message, "ends early"));
    write_file(file.path, good);
    trunk.open(9);
    CHECK(trunk.feed(9, {5, 6, 7}, 2) == expected);
}

TEST_CASE("a pack without these layers, or cut into other pieces, is refused before it is read") {
    const model::ModelConfig& config = tiny_model().config;
    const PackFile some({0, 5});
    Stream stream;
    stream.pack = some.open();
    auto refused = load(tiny_model(), {4, 9}, stream);
    REQUIRE_FALSE(refused.has_value());
    CHECK(refused.error().code == ErrorCode::not_found);
    CHECK(contains(refused.error().message, "lacks 9 of the 10 runs of layers 4-12"));

    pack::PackPlan plan = pack::plan_trunk_pack(tiny_model(), 0, config.n_layers);
    plan.entries[3].piece_bytes = 8192;
    const auto path = some.temp.path() / "other";
    REQUIRE(
        pack::write_pack(
            plan, path,
            [](const pack::Entry&, std::uint64_t, std::span<std::byte>) { return Status::ok(); },
            go_on)
            .has_value());
    stream.pack = pack::Pack::open(path).value();
    refused = load(tiny_model(), {0, config.n_layers}, stream);
    REQUIRE_FALSE(refused.has_value());
    CHECK(refused.error().code == ErrorCode::incompatible);
    CHECK(contains(refused.error().message,
                   "layer 2 has checksums for 8192 bytes each, and this build reads 4096"));
    CHECK(contains(refused.error().remedy, "k3pipe pack trunk"));
}

}  // namespace k3::test
