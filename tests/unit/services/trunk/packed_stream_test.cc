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
#include "tests/support/write_over.h"
#include "tests/unit/services/trunk/streams.h"

namespace k3::test {

namespace {

using trunk::LayerRange;
using Mode = storage::DirectFile::Mode;

bool go_on(std::uint64_t /*done*/, std::uint64_t /*total*/) { return true; }

/// A pack of tiny-k3's trunk, or of some of its layers, or one that is striped over several files.
struct PackFile {
    TempDir temp;
    std::vector<std::filesystem::path> paths;

    explicit PackFile(LayerRange range = {0, tiny_model().config.n_layers},
                      std::uint32_t n_parts = 1) {
        for (std::uint32_t i = 0; i < n_parts; ++i) {
            paths.push_back(temp.path() / ("trunk-" + std::to_string(i)));
            REQUIRE(pack::make_trunk_pack(tiny_model(), range.first, range.count, paths[i], go_on,
                                          {i, n_parts})
                        .has_value());
        }
    }
    const std::filesystem::path& path() const { return paths.front(); }
    pack::TrunkPacks open(Mode mode = Mode::direct_if_possible) const {
        return pack::TrunkPacks::open(paths, mode).value();
    }
};

/// In place: whoever has the file open sees it.
void flip_bit(const std::filesystem::path& file, std::uint64_t offset) {
    std::string bytes = read_file(file);
    bytes[offset] = static_cast<char>(bytes[offset] ^ 0x20);
    write_over(file, bytes);
}

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
        stream.packs = file.open(c.mode);
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
        stream.packs = file.open();
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
    const std::string good = read_file(file.path());
    const pack::TrunkPacks packs = file.open();
    const pack::Pack* pack = &packs.part(0);
    Stream stream;
    stream.packs = packs;
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
        flip_bit(file.path(), entry.offset + at);
        Error error{ErrorCode::internal, "no step failed", ""};
        for (int i = 0; i < 2; ++i) {  // what the ring holds already is good
            trunk.open(++session);
            const auto logits = trunk.step({{session, 5}}, {0});
            if (!logits.has_value()) error = logits.error();
        }
        CHECK(error.code == ErrorCode::corrupt);
        CHECK(contains(error.message, file.path().string() + ": " + name + ": the checksum of"));
        CHECK(contains(error.message, is_embedding ? "embedding of token 5" : largest->spec.name));
        write_over(file.path(), good);
        trunk.open(++session);
        CHECK(trunk.feed(session, {5, 6, 7}, 2) == expected);
    }
}

TEST_CASE("a flipped bit in what is kept ends the start") {
    const PackFile file;
    const pack::TrunkPacks packs = file.open();
    const pack::Entry& layer = *packs.part(0).find({3, 0});
    for (const std::uint64_t at : {std::uint64_t{0}, layer.bytes / 2, layer.bytes - 1}) {
        flip_bit(file.path(), layer.offset + at);
        Stream stream;
        stream.budget = all_bytes() - 1;
        stream.packs = packs;
        const auto loaded = load(tiny_model(), {0, 13}, stream);
        REQUIRE_FALSE(loaded.has_value());
        CHECK(loaded.error().code == ErrorCode::corrupt);
        CHECK(contains(loaded.error().message, "layer 3: the checksum of 4096 bytes"));
        flip_bit(file.path(), layer.offset + at);
    }
}

TEST_CASE("a pack that is cut while it is streamed fails steps with its name, until it is back") {
    const PackFile file;
    const std::string good = read_file(file.path());
    Stream stream;
    stream.packs = file.open();
    Harness trunk(tiny_model(), harness_options(tiny_model(), stream));
    trunk.open(1);
    const auto expected = trunk.feed(1, {5, 6, 7}, 2);
    std::filesystem::resize_file(file.path(), stream.packs->part(0).find({4, 0})->offset);
    Error error{ErrorCode::internal, "no step failed", ""};
    for (std::uint64_t i = 2; i < 4; ++i) {
        trunk.open(i);
        const auto logits = trunk.step({{i, 5}}, {0});
        if (!logits.has_value()) error = logits.error();
    }
    CHECK(error.code == ErrorCode::corrupt);
    CHECK(contains(error.message, file.path().string()));
    CHECK(contains(error.message, "ends early"));
    write_file(file.path(), good);
    trunk.open(9);
    CHECK(trunk.feed(9, {5, 6, 7}, 2) == expected);
}

TEST_CASE("a pack without these layers, or cut into other pieces, is refused before it is read") {
    const model::ModelConfig& config = tiny_model().config;
    const PackFile some({0, 5});
    Stream stream;
    stream.packs = some.open();
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
    stream.packs = pack::TrunkPacks::of({pack::Pack::open(path).value()}).value();
    refused = load(tiny_model(), {0, config.n_layers}, stream);
    REQUIRE_FALSE(refused.has_value());
    CHECK(refused.error().code == ErrorCode::incompatible);
    CHECK(contains(refused.error().message,
                   "layer 2 has checksums for 8192 bytes each, and this build reads 4096"));
    CHECK(contains(refused.error().remedy, "k3pipe pack trunk"));
}

TEST_CASE("a pack that is striped over files gives the same bits, streamed and in memory") {
    const std::vector<float> expected = resident_conversation();
    const model::ModelConfig& config = tiny_model().config;
    for (const std::uint32_t n_parts : {2U, 3U}) {
        const PackFile file({0, config.n_layers}, n_parts);
        for (const std::uint64_t budget : {std::uint64_t{0}, all_bytes() / 2}) {
            CAPTURE(n_parts);
            CAPTURE(budget);
            Stream stream;
            stream.budget = budget;
            stream.packs = file.open(n_parts == 2 ? Mode::direct_if_possible : Mode::buffered);
            Harness trunk(tiny_model(), harness_options(tiny_model(), stream));
            CHECK(conversation(trunk) == expected);
            CHECK(stream.counter("trunk_read_threads") == n_parts * stream.shape.n_threads);
        }
        const pack::TrunkPacks packs = file.open();
        Harness::Options resident;
        resident.weights = [&](LayerRange range) -> std::unique_ptr<trunk::WeightSource> {
            return trunk::RamWeights::load(packs, config, range, nullptr).value();
        };
        Harness trunk(tiny_model(), resident);
        CHECK(conversation(trunk) == expected);
    }
}

TEST_CASE("a flipped bit in one of several parts names that file, and nothing of it is used") {
    const model::ModelConfig& config = tiny_model().config;
    const PackFile file({0, config.n_layers}, 2);
    Stream stream;
    stream.packs = file.open();
    Harness trunk(tiny_model(), harness_options(tiny_model(), stream));
    std::uint64_t session = 0;
    for (const std::uint32_t part : {0U, 1U}) {
        const std::string good = read_file(file.paths[part]);
        const pack::Entry& layer = *stream.packs->part(part).find({6, 0});
        std::string bad = good;
        for (std::uint64_t at = layer.offset; at < layer.offset + layer.bytes; at += 4096)
            bad[at] = static_cast<char>(bad[at] ^ 1);
        write_over(file.paths[part], bad);
        Error error{ErrorCode::internal, "no step failed", ""};
        for (int i = 0; i < 2; ++i) {
            trunk.open(++session);
            const auto logits = trunk.step({{session, 5}}, {0});
            if (!logits.has_value()) error = logits.error();
        }
        CHECK(error.code == ErrorCode::corrupt);
        CHECK(contains(error.message, file.paths[part].string() + ": layer 6: the checksum of"));
        write_over(file.paths[part], good);
    }
    const auto refused = [&] {
        return trunk::RamWeights::load(*stream.packs, config, {0, config.n_layers}, nullptr);
    };
    CHECK(refused().has_value());
    flip_bit(file.paths[1], stream.packs->part(1).find({2, 0})->offset);
    CHECK(refused().error().code == ErrorCode::corrupt);
    CHECK(contains(refused().error().message, file.paths[1].string() + ": layer 2"));
}

TEST_CASE("parts that are missing, given twice or of other packs are refused by name") {
    const model::ModelConfig& config = tiny_model().config;
    const PackFile two({0, config.n_layers}, 2);
    const PackFile three({0, config.n_layers}, 3);
    const auto refusal = [](const std::vector<std::filesystem::path>& files) {
        const auto packs = pack::TrunkPacks::open(files);
        REQUIRE_FALSE(packs.has_value());
        CHECK(!packs.error().remedy.empty());
        return packs.error();
    };
    const Error missing = refusal({two.paths[1]});
    CHECK(missing.code == ErrorCode::not_found);
    CHECK(contains(missing.message,
                   two.paths[1].string() + " is part 1/2 of a pack, and part 0/2 is missing"));
    const Error twice = refusal({two.paths[0], two.paths[0]});
    CHECK(twice.code == ErrorCode::invalid_argument);
    CHECK(contains(twice.message, "are both part 0/2"));
    CHECK(refusal({two.paths[0], three.paths[1]}).code == ErrorCode::incompatible);
    const auto other = two.temp.path() / "other";
    REQUIRE(
        pack::make_trunk_pack(demo_model(), 0, demo_model().config.n_layers, other, go_on, {1, 2})
            .has_value());
    const Error foreign = refusal({two.paths[0], other});
    CHECK(foreign.code == ErrorCode::incompatible);
    CHECK(contains(foreign.message, demo_model().fingerprint));
    CHECK(contains(foreign.message, tiny_model().fingerprint));
    // All parts, of fewer layers than the stage has.
    const PackFile some({0, 5}, 2);
    const pack::TrunkPacks packs = some.open();
    const auto lacking = trunk::PackFiles::open(packs, config, {4, 9});
    REQUIRE_FALSE(lacking.has_value());
    CHECK(lacking.error().code == ErrorCode::not_found);
    CHECK(contains(lacking.error().message, "lacks 9 of the 10 runs of layers 4-12"));
}

}  // namespace k3::test
