// Reading experts from checkpoints: every order and cut of the six tensors, and every damage.

#include "services/experts/expert_store.h"

#include <doctest/doctest.h>

#include <algorithm>
#include <fstream>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "tests/support/checkpoint_copy.h"
#include "tests/support/golden.h"
#include "tests/support/text.h"
#include "tests/unit/services/experts/aligned_slot.h"

using namespace k3;
using namespace k3::experts;

namespace {

model::Model open_model(const std::filesystem::path& directory) {
    Result<model::Model> model = model::open_model(directory);
    REQUIRE_MESSAGE(model.has_value(), (model.has_value() ? "" : model.error().message));
    return std::move(model).value();
}

using Mode = storage::DirectFile::Mode;

std::unique_ptr<CheckpointStore> make_store(const model::Model& model, const char* share = "all",
                                            Mode mode = Mode::direct_if_possible) {
    auto held = model::parse_share(share, model.config);
    REQUIRE(held.has_value());
    auto store = CheckpointStore::create(model, *held, mode);
    REQUIRE_MESSAGE(store.has_value(), (store.has_value() ? "" : store.error().message));
    return std::move(store).value();
}

/// The record put together tensor by tensor.
std::vector<std::byte> expected_record(const model::Model& model, ExpertKey key) {
    std::vector<std::byte> record;
    for (const model::TensorSpec& spec :
         model::expert_tensors(model.config, key.layer, key.expert)) {
        const storage::TensorInfo* tensor = model.checkpoint->find(spec.name);
        REQUIRE(tensor != nullptr);
        std::vector<std::byte> bytes(tensor->bytes);
        REQUIRE(model.checkpoint->read(*tensor, bytes).has_value());
        record.insert(record.end(), bytes.begin(), bytes.end());
    }
    return record;
}

nlohmann::json faults() {
    std::ifstream file(test::golden_dir() / "expected" / "corrupt.json");
    return nlohmann::json::parse(file)["faults"];
}

}  // namespace

TEST_CASE("every expert is read whole, direct or not, the one that lies in two shards too") {
    const model::Model model = open_model(test::golden_dir() / "tiny-k3");
    for (const Mode mode : {Mode::direct_if_possible, Mode::buffered}) {
        auto store = make_store(model, "all", mode);
        REQUIRE(store->record_bytes() == 9792);
        REQUIRE(store->slot_bytes() == 4 * 4096);
        // The message says why some experts are not read directly: the one that is cut, at least.
        CHECK(!store->why_buffered().empty());
        const bool direct = test::contains(store->why_buffered(), "1 of 288 experts");
        if (mode == Mode::buffered) CHECK(test::contains(store->why_buffered(), "switched off"));
        test::AlignedSlot slot(*store);
        std::uint64_t rounding_bytes = 0;
        for (std::uint32_t layer = 1; layer < model.config.n_layers; ++layer) {
            for (std::uint32_t expert = 0; expert < model.config.moe.n_experts; ++expert) {
                const StoreCounts before = store->counts();
                const auto record = store->read({layer, expert}, slot.span());
                REQUIRE(record.has_value());
                const std::vector<std::byte> expected = expected_record(model, {layer, expert});
                REQUIRE(
                    std::equal(record->begin(), record->end(), expected.begin(), expected.end()));
                const bool is_cut = layer == 7 && expert == 13;
                REQUIRE(store->counts().runs - before.runs == (is_cut ? 2 : 1));
                if (!direct || is_cut) continue;
                // Whole blocks, but for the end of the file.
                const auto specs = model::expert_tensors(model.config, layer, expert);
                const storage::TensorInfo* first = model.checkpoint->find(specs[0].name);
                const std::uint64_t end = storage::block_ceiling(first->offset + 9792);
                rounding_bytes +=
                    std::min<std::uint64_t>(end, std::filesystem::file_size(
                                                     model.checkpoint->shard_path(first->shard))) -
                    storage::block_floor(first->offset) - 9792;
            }
        }
        CHECK(store->counts().read_bytes == 12 * 24 * 9792);
        CHECK(store->counts().rounding_bytes == rounding_bytes);
        CHECK((rounding_bytes > 0) == direct);
    }
}

TEST_CASE("another order of the tensors in a shard is still one read and the same record") {
    test::CheckpointCopy copy(test::golden_dir() / "tiny-k3");
    const std::string prefix = "language_model.model.layers.1.block_sparse_moe.experts.5.";
    // w1 and w3 have equal sizes: exchanging their places reverses the order inside the run.
    copy.edit_header("model-00001-of-000005.safetensors", [&](std::string text) {
        nlohmann::json header = nlohmann::json::parse(text);
        for (const char* part : {".weight_packed", ".weight_scale"})
            std::swap(header[prefix + "w1" + part]["data_offsets"],
                      header[prefix + "w3" + part]["data_offsets"]);
        return header.dump();
    });
    const model::Model model = open_model(copy.path());
    auto store = make_store(model);
    test::AlignedSlot slot(*store);
    const auto read = store->read({1, 5}, slot.span());
    REQUIRE(read.has_value());
    const std::vector<std::byte> record(read->begin(), read->end());
    CHECK(record == expected_record(model, {1, 5}));
    CHECK(store->counts().runs == 1);
    CHECK(store->counts().rounding_bytes == 0);  // part by part, through the page cache
    const model::Model original = open_model(test::golden_dir() / "tiny-k3");
    const std::vector<std::byte> before = expected_record(original, {1, 5});
    CHECK(record != before);
    const ExpertRecord layout(model.config);
    CHECK(std::equal(record.begin(), record.begin() + static_cast<std::ptrdiff_t>(layout.offset(1)),
                     before.begin() + static_cast<std::ptrdiff_t>(layout.offset(4))));
}

TEST_CASE("each fault of the golden list is refused with its names") {
    const nlohmann::json list = faults();
    REQUIRE(list.size() == 3);
    for (const nlohmann::json& fault : list) {
        CAPTURE(fault["tensor"].get<std::string>());
        test::CheckpointCopy copy(test::golden_dir() / "tiny-k3");
        copy.set_byte(fault["file"].get<std::string>(), fault["byte_offset"].get<std::uint64_t>(),
                      fault["becomes"].get<std::uint8_t>());
        const model::Model model = open_model(copy.path());
        auto store = make_store(model);
        test::AlignedSlot slot(*store);
        const auto number = [&](const char* name) {
            return std::to_string(fault[name].get<int>());
        };
        const auto read =
            store->read({fault["layer"].get<std::uint32_t>(), fault["expert"].get<std::uint32_t>()},
                        slot.span());
        REQUIRE(!read.has_value());
        CAPTURE(read.error().sentence());
        CHECK(read.error().code == ErrorCode::corrupt);
        CHECK(test::contains(read.error().sentence(),
                             "layer " + number("layer") + " expert " + number("expert")));
        CHECK(test::contains(read.error().sentence(), fault["tensor"].get<std::string>()));
        CHECK(test::contains(read.error().sentence(),
                             "row " + number("row") + " group " + number("group")));
        CHECK(test::contains(read.error().sentence(), fault["file"].get<std::string>()));
        CHECK(test::contains(read.error().sentence(), "byte " + number("byte_offset")));
        // Its neighbours are as good as before.
        CHECK(store->read({2, 0}, slot.span()).has_value());
    }
}

TEST_CASE("a weight that fp32 cannot hold is refused like a scale of 255") {
    test::CheckpointCopy copy(test::golden_dir() / "tiny-k3");
    const model::Model model = open_model(copy.path());
    const auto specs = model::expert_tensors(model.config, 3, 4);
    const storage::TensorInfo* packed = model.checkpoint->find(specs[2].name);
    const storage::TensorInfo* scale = model.checkpoint->find(specs[3].name);
    const std::string shard = model.checkpoint->shard_path(scale->shard).filename().string();
    auto store = make_store(model);
    test::AlignedSlot slot(*store);
    for (std::uint64_t i = 0; i < 16; ++i) copy.set_byte(shard, packed->offset + i, 0x15);
    copy.set_byte(shard, scale->offset, 253);
    CHECK(store->read({3, 4}, slot.span()).has_value());  // 3 * 2^126 fits
    copy.set_byte(shard, packed->offset + 15, 0x65);
    const auto read = store->read({3, 4}, slot.span());  // 4 * 2^126 does not
    REQUIRE(!read.has_value());
    CHECK(read.error().code == ErrorCode::corrupt);
    CHECK(test::contains(read.error().sentence(), "scale byte 253"));
}

TEST_CASE("a shard that shrinks while it is served gives a short read, not zeros") {
    for (const Mode mode : {Mode::direct_if_possible, Mode::buffered}) {
        test::CheckpointCopy copy(test::golden_dir() / "tiny-k3");
        const model::Model model = open_model(copy.path());
        auto store = make_store(model, "all", mode);
        const auto specs = model::expert_tensors(model.config, 1, 5);
        const storage::TensorInfo* tensor = model.checkpoint->find(specs[2].name);
        const auto shard = model.checkpoint->shard_path(tensor->shard);
        copy.truncate(shard.filename().string(), tensor->offset + 100);
        test::AlignedSlot slot(*store);
        const auto read = store->read({1, 5}, slot.span());
        REQUIRE(!read.has_value());
        CHECK(read.error().code == ErrorCode::corrupt);
        CHECK(test::contains(read.error().sentence(), "layer 1 expert 5"));
        CHECK(test::contains(read.error().sentence(), shard.string()));
        CHECK(test::contains(read.error().sentence(), "ends early"));
        CHECK(store->counts().read_bytes == 0);
    }
}

TEST_CASE("a store has the experts of its share and asks for no others") {
    const model::Model model = open_model(test::golden_dir() / "tiny-k3");
    auto store = make_store(model, "layers 1-2 experts 0-3");
    test::AlignedSlot slot(*store);
    CHECK(store->read({2, 3}, slot.span()).has_value());
    for (ExpertKey key : {ExpertKey{2, 4}, ExpertKey{3, 0}, ExpertKey{0, 0}, ExpertKey{13, 0},
                          ExpertKey{2, 24}, ExpertKey{4000000000U, 4000000000U}}) {
        const auto read = store->read(key, slot.span());
        REQUIRE(!read.has_value());
        CHECK(read.error().code == ErrorCode::not_found);
    }
}

TEST_CASE("tensors of held experts that are absent are reported together") {
    const model::Model tiny = open_model(test::golden_dir() / "tiny-k3");
    model::Model wrong = tiny;
    wrong.config.moe.n_experts = 26;  // two more than the files hold
    auto held = model::parse_share("experts 20-25", wrong.config);
    REQUIRE(held.has_value());
    auto store = CheckpointStore::create(wrong, *held);
    REQUIRE(!store.has_value());
    CHECK(store.error().code == ErrorCode::not_found);
    CHECK(test::contains(store.error().sentence(), "experts.24.w1.weight_packed"));
    CHECK(test::contains(store.error().sentence(),
                         "and 141 more"));  // 12 layers, 2 experts, 6 tensors
    auto without = model::parse_share("experts 20-23", wrong.config);
    CHECK(CheckpointStore::create(wrong, *without).has_value());
}
