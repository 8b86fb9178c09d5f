// Opening a model directory: what comes out for the golden checkpoints, and fingerprints.

#include "common/model/load.h"

#include <doctest/doctest.h>

#include <string>

#include "common/model/tensor_names.h"
#include "tests/support/checkpoint_copy.h"
#include "tests/support/golden.h"

namespace k3::model {
namespace {

using test::CheckpointCopy;

Model open_or_fail(const std::filesystem::path& directory) {
    Result<Model> model = open_model(directory);
    if (!model) FAIL(model.error().sentence());
    return std::move(model).value();
}

/// Where byte `at` of a tensor lies.
struct Place {
    std::string shard;
    std::uint64_t offset;
};
Place place_of(const Model& model, std::string_view tensor, std::uint64_t at) {
    const storage::TensorInfo* info = model.checkpoint->find(tensor);
    REQUIRE(info != nullptr);
    REQUIRE(at < info->bytes);
    return {model.checkpoint->shard_path(info->shard).filename().string(), info->offset + at};
}

TEST_CASE("the golden and the embedded checkpoint open and hold every tensor they should") {
    for (const auto& directory : {test::golden_dir() / "tiny-k3", test::demo_model_dir()}) {
        CAPTURE(directory);
        Model model = open_or_fail(directory);
        CHECK(model.config.name == directory.filename());
        Status trunk =
            check_trunk_tensors(*model.checkpoint, model.config, 0, model.config.n_layers);
        CHECK_MESSAGE(trunk.has_value(), (trunk ? "" : trunk.error().sentence()));
        Status experts =
            check_expert_tensors(*model.checkpoint, model.config, 0, model.config.n_layers);
        CHECK_MESSAGE(experts.has_value(), (experts ? "" : experts.error().sentence()));
        // And nothing else: the names of the spec account for every text tensor.
        std::size_t expected = model_level_tensors(model.config).size();
        for (std::uint32_t layer = 0; layer < model.config.n_layers; ++layer) {
            expected += trunk_layer_tensors(model.config, layer).size();
            if (model.config.is_moe(layer)) expected += std::size_t{6} * model.config.moe.n_experts;
        }
        CHECK(model.checkpoint->tensors().size() == expected);
    }
}

TEST_CASE("two checkpoints have two fingerprints, a copy has the same") {
    Model tiny = open_or_fail(test::golden_dir() / "tiny-k3");
    Model demo = open_or_fail(test::demo_model_dir());
    CHECK(tiny.fingerprint.size() == 32);
    CHECK(tiny.fingerprint.find_first_not_of("0123456789abcdef") == std::string::npos);
    CHECK(tiny.fingerprint != demo.fingerprint);
    CheckpointCopy copy(test::golden_dir() / "tiny-k3");
    CHECK(open_or_fail(copy.path()).fingerprint == tiny.fingerprint);
}

TEST_CASE("the fingerprint is the same without an open checkpoint, and as careful") {
    for (const auto& directory : {test::golden_dir() / "tiny-k3", test::demo_model_dir()}) {
        const Model model = open_or_fail(directory);
        const auto scanned = fingerprint(directory, model.config);
        REQUIRE_MESSAGE(scanned.has_value(), scanned.error().sentence());
        CHECK(*scanned == model.fingerprint);
    }
    const Model tiny = open_or_fail(test::golden_dir() / "tiny-k3");
    const Place place = place_of(tiny, layer_tensor(5, "self_attn.o_proj.weight"), 2000);
    CheckpointCopy copy(test::golden_dir() / "tiny-k3");
    copy.set_byte(place.shard, place.offset, 0x5A);
    const auto other = fingerprint(copy.path(), tiny.config);
    REQUIRE(other.has_value());
    CHECK(*other == open_or_fail(copy.path()).fingerprint);
    CHECK(*other != tiny.fingerprint);
    copy.truncate(place.shard, place.offset - 100);
    CHECK(fingerprint(copy.path(), tiny.config).error().code == ErrorCode::corrupt);
    ModelConfig deeper = tiny.config;
    ++deeper.n_layers;
    const auto lacking = fingerprint(test::golden_dir() / "tiny-k3", deeper);
    REQUIRE_FALSE(lacking.has_value());
    CHECK(lacking.error().code == ErrorCode::not_found);
    CHECK(lacking.error().message.find("layers.13.self_attn.o_proj.weight") != std::string::npos);
}

TEST_CASE("one flipped byte in a sampled part changes the fingerprint") {
    Model tiny = open_or_fail(test::golden_dir() / "tiny-k3");
    for (std::string name :
         {layer_tensor(0, "self_attn.o_proj.weight"), layer_tensor(12, "self_attn.o_proj.weight"),
          std::string(kEmbeddingTensor), std::string(kHeadTensor)}) {
        CAPTURE(name);
        CheckpointCopy copy(test::golden_dir() / "tiny-k3");
        Place middle = place_of(tiny, name, tiny.checkpoint->find(name)->bytes / 2);
        copy.flip_byte(middle.shard, middle.offset, 1);
        CHECK(open_or_fail(copy.path()).fingerprint != tiny.fingerprint);
    }
}

TEST_CASE("another value in the config changes the fingerprint, a reformatted file does not") {
    Model tiny = open_or_fail(test::golden_dir() / "tiny-k3");
    CheckpointCopy copy(test::golden_dir() / "tiny-k3");
    copy.replace_text("config.json", "\"use_cache\": true", "\"use_cache\"   :\n\n true");
    CHECK(open_or_fail(copy.path()).fingerprint == tiny.fingerprint);
    copy.replace_text("config.json", "\"rms_norm_eps\": 1e-05", "\"rms_norm_eps\": 1.0000001e-05");
    CHECK(open_or_fail(copy.path()).fingerprint != tiny.fingerprint);
}

TEST_CASE("a model directory that is not there is refused by name") {
    Result<Model> model = open_model(test::golden_dir() / "no-such-model");
    REQUIRE(!model);
    CHECK(model.error().code == ErrorCode::not_found);
    CHECK(model.error().message.find("no-such-model does not exist") != std::string::npos);
    CHECK(exit_code(model.error().code) == kExitModel);
    CHECK(!model.error().remedy.empty());
}

}  // namespace
}  // namespace k3::model
