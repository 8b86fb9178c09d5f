// Packs of a checkpoint: every tensor and every record is in its place, with its bytes.

#include "common/pack/make_pack.h"

#include <doctest/doctest.h>

#include <cstring>
#include <string>
#include <vector>

#include "common/model/synthetic.h"
#include "common/pack/pack.h"
#include "common/pack/trunk_run.h"
#include "tests/support/golden.h"
#include "tests/unit/common/pack/fixtures.h"

using namespace k3;
using namespace k3::pack;
using namespace k3::test;

namespace {

model::Model tiny(const std::filesystem::path& directory = golden_dir() / "tiny-k3") {
    auto model = model::open_model(directory);
    REQUIRE_MESSAGE(model.has_value(), model.error().sentence());
    return std::move(model).value();
}

/// All tensors of a run against the checkpoint; returns how many.
std::size_t check_run(const model::Model& model, const Pack& pack, const TrunkRun& run) {
    const Entry* entry = pack.find(run.key());
    REQUIRE(entry != nullptr);
    REQUIRE(entry->bytes == run.bytes());
    MemoryBlock memory = MemoryBlock::create(entry->stored_bytes(), "a test").value();
    REQUIRE(pack.read(*entry, memory.span()).has_value());
    for (const PlacedTensor& placed : run.tensors()) {
        CAPTURE(placed.spec.name);
        CHECK(run.find(placed.spec.name) == &placed);
        CHECK(placed.offset % kTensorAlignment == 0);
        const storage::TensorInfo* tensor = model.checkpoint->find(placed.spec.name);
        REQUIRE(tensor != nullptr);
        std::vector<std::byte> bytes(tensor->bytes);
        REQUIRE(model.checkpoint->read(*tensor, bytes).has_value());
        REQUIRE(placed.offset + bytes.size() <= run.bytes());
        CHECK(std::memcmp(memory.data() + placed.offset, bytes.data(), bytes.size()) == 0);
    }
    return run.tensors().size();
}

}  // namespace

TEST_CASE("a trunk pack holds every trunk tensor of the checkpoint") {
    const model::Model model = tiny();
    TempDir dir;
    const auto path = dir.path() / "trunk";
    auto written = make_trunk_pack(model, 0, model.config.n_layers, path, go_on);
    REQUIRE_MESSAGE(written.has_value(), written.error().sentence());
    CHECK(written->file_bytes == std::filesystem::file_size(path));
    CHECK(written->file_bytes == file_bytes(plan_trunk_pack(model, 0, model.config.n_layers)));
    auto pack = Pack::open(path, Kind::trunk);
    REQUIRE(pack.has_value());
    CHECK((*pack)->origin() == origin_of(model));
    std::size_t n_tensors = 0;
    const auto runs = trunk_runs(model.config, 0, model.config.n_layers);
    CHECK(runs.size() == model.config.n_layers + 2);
    CHECK((*pack)->entries().size() == runs.size());
    for (const TrunkRun& run : runs) n_tensors += check_run(model, **pack, run);
    std::size_t n_trunk = 0;
    for (const storage::TensorInfo& tensor : model.checkpoint->tensors())
        n_trunk += contains(std::string(tensor.name), ".experts.") ? 0 : 1;
    CHECK(n_tensors == n_trunk);
    CHECK((*pack)->name_of((*pack)->entries()[1].key) == "the embedding");
}

TEST_CASE("checksums of the released trunk are for 64 KiB, of its embedding for a row") {
    model::SyntheticOptions options;
    options.n_layers = 93;
    options.n_experts = 896;
    options.vocab_size = 163'840;
    const model::ModelConfig config = model::plan_synthetic(options).value().config;
    const model::ReadUnits units = read_units(config, {0, config.n_layers});
    CHECK(units.matrices == 65'536);
    CHECK(units.embedding == 16'384);
    std::uint64_t n_pieces = 0;
    for (const TrunkRun& run : trunk_runs(config, 0, config.n_layers))
        n_pieces += entry_of(run).n_pieces();
    CHECK(n_pieces * sizeof(std::uint64_t) < 15'000'000);
    CHECK(read_units(config, {5, 3}).embedding == storage::kBlockBytes);  // it has none

    const model::ReadUnits small = read_units(tiny().config, {0, tiny().config.n_layers});
    CHECK(small.matrices == storage::kBlockBytes);
    CHECK(small.embedding == storage::kBlockBytes);
}

TEST_CASE("a pack of some layers has the embedding with the first and the head with the last") {
    const model::Model model = tiny();
    TempDir dir;
    auto keys = [&](std::uint32_t first, std::uint32_t count) {
        const auto path = dir.path() / (std::to_string(first) + "-" + std::to_string(count));
        REQUIRE(make_trunk_pack(model, first, count, path, go_on).has_value());
        std::vector<EntryKey> found;
        const auto pack = Pack::open(path).value();
        for (const Entry& entry : pack->entries()) found.push_back(entry.key);
        return found;
    };
    CHECK(keys(0, 2) == std::vector<EntryKey>{{0, 0}, {0, 1}, {1, 0}});
    CHECK(keys(5, 1) == std::vector<EntryKey>{{5, 0}});
    CHECK(keys(11, 2) == std::vector<EntryKey>{{11, 0}, {12, 0}, {12, 2}});
}

TEST_CASE("an expert pack holds the records of its share and no others") {
    const model::Model model = tiny();
    TempDir dir;
    for (const char* share : {"1/3", "layers 1-2 experts 0-3; layers 7 experts 13"}) {
        CAPTURE(share);
        const auto held = model::parse_share(share, model.config).value();
        const auto path = dir.path() / ("experts" + std::to_string(held.count()));
        auto written = make_expert_pack(model, held, path, go_on);
        REQUIRE_MESSAGE(written.has_value(), written.error().sentence());
        const auto pack = Pack::open(path, Kind::experts).value();
        CHECK(pack->entries().size() == held.count());
        for (const Entry& entry : pack->entries()) {
            CAPTURE(pack->name_of(entry.key));
            REQUIRE(held.holds(entry.key.layer, entry.key.part));
            REQUIRE(entry.n_pieces() == 1);
            MemoryBlock memory = MemoryBlock::create(entry.stored_bytes(), "a test").value();
            REQUIRE(pack->read(entry, memory.span()).has_value());
            std::uint64_t at = 0;
            for (const auto& spec :
                 model::expert_tensors(model.config, entry.key.layer, entry.key.part)) {
                const storage::TensorInfo* tensor = model.checkpoint->find(spec.name);
                std::vector<std::byte> bytes(tensor->bytes);
                REQUIRE(model.checkpoint->read(*tensor, bytes).has_value());
                CHECK(std::memcmp(memory.data() + at, bytes.data(), bytes.size()) == 0);
                at += bytes.size();
            }
            CHECK(at == entry.bytes);
        }
    }
}

TEST_CASE("an expert with a scale of 255 gets into no pack") {
    CheckpointCopy copy(golden_dir() / "tiny-k3");
    const model::Model model = tiny(copy.path());
    const auto specs = model::expert_tensors(model.config, 3, 4);
    const storage::TensorInfo* scale = model.checkpoint->find(specs[3].name);
    copy.set_byte(model.checkpoint->shard_path(scale->shard).filename().string(),
                  scale->offset + 40, 255);
    TempDir dir;
    const auto held = model::parse_share("layers 3", model.config).value();
    auto written = make_expert_pack(model, held, dir.path() / "p", go_on);
    REQUIRE_FALSE(written.has_value());
    CHECK(written.error().code == ErrorCode::corrupt);
    CHECK(contains(written.error().message, "layer 3 expert 4"));
    CHECK(contains(written.error().message, "scale byte 255"));
    CHECK_FALSE(std::filesystem::exists(dir.path() / "p"));
}

TEST_CASE("the same checkpoint gives the same bytes of a pack") {
    const model::Model model = tiny();
    TempDir dir;
    const auto held = model::parse_share("0/2", model.config).value();
    for (const char* name : {"a", "b"})
        REQUIRE(make_expert_pack(model, held, dir.path() / name, go_on).has_value());
    CHECK(read_file(dir.path() / "a") == read_file(dir.path() / "b"));
}
