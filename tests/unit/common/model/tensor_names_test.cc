// Names, shapes and types of tensors, and the check of a checkpoint against them.

#include "common/model/tensor_names.h"

#include <doctest/doctest.h>

#include <algorithm>
#include <string>

#include "common/model/load.h"
#include "tests/support/checkpoint_copy.h"
#include "tests/support/golden.h"

namespace k3::model {
namespace {

using test::CheckpointCopy;

constexpr const char* kShard1 = "model-00001-of-000005.safetensors";
constexpr const char* kIndex = "model.safetensors.index.json";

/// The released sizes, as far as they decide tensors.
ModelConfig released() {
    ModelConfig c;
    c.hidden_size = 7168;
    c.n_layers = 93;
    c.vocab_size = 163840;
    c.intermediate_size = 33792;
    c.first_k_dense = 1;
    c.attn_res_block = 12;
    c.kda = {96, 128, 4, -5.0F};
    c.mla = {96, 1536, 512, 128, 64, 128, 1e-6F};
    c.moe.n_experts = 896;
    c.moe.top_k = 16;
    c.moe.latent_size = 3584;
    c.moe.moe_intermediate_size = 3072;
    c.moe.n_shared_experts = 2;
    c.layer_kinds.assign(93, LayerKind::kda);
    for (std::uint32_t layer = 3; layer < 93; layer += 4) c.layer_kinds[layer] = LayerKind::mla;
    c.layer_kinds[92] = LayerKind::mla;
    return c;
}

std::string shape_of(std::span<const TensorSpec> specs, const std::string& name) {
    for (const TensorSpec& spec : specs)
        if (spec.name == name)
            return std::string(storage::to_string(spec.dtype)) + storage::to_string(spec.shape);
    return "absent";
}

TEST_CASE("the released sizes give the counts and bytes of the released shards") {
    const ModelConfig c = released();
    auto layer_bytes = [&](std::uint32_t layer) {
        std::uint64_t experts = c.is_moe(layer) ? expert_bytes(c) * c.moe.n_experts : 0;
        return storage::total_bytes(trunk_layer_tensors(c, layer)) + experts;
    };
    // Spec section 2.1: tensors and payload bytes of each kind of shard.
    CHECK(trunk_layer_tensors(c, 0).size() == 23);
    CHECK(trunk_layer_tensors(c, 1).size() + 896 * 6 == 5404);
    CHECK(trunk_layer_tensors(c, 3).size() + 896 * 6 == 5398);
    CHECK(model_level_tensors(c).size() == 5);
    CHECK(layer_bytes(0) == 2'341'213'184);
    CHECK(layer_bytes(1) == 16'990'092'800);
    CHECK(layer_bytes(3) == 16'566'684'160);
    CHECK(storage::total_bytes(model_level_tensors(c)) == 4'697'663'488);
    CHECK(expert_bytes(c) == 17'547'264);
    std::uint64_t total = storage::total_bytes(model_level_tensors(c));
    for (std::uint32_t layer = 0; layer < 93; ++layer) total += layer_bytes(layer);
    CHECK(total == 1'559'965'606'912);
}

TEST_CASE("an expert's six tensors come in order and add up to its bytes") {
    const ModelConfig c = released();
    auto tensors = expert_tensors(c, 7, 13);
    CHECK(storage::total_bytes(tensors) == expert_bytes(c));
    const std::string prefix = "language_model.model.layers.7.block_sparse_moe.experts.13.";
    const char* names[] = {"w1.weight_packed", "w1.weight_scale",  "w2.weight_packed",
                           "w2.weight_scale",  "w3.weight_packed", "w3.weight_scale"};
    const char* shapes[] = {"U8[3072, 1792]", "U8[3072, 112]",  "U8[3584, 1536]",
                            "U8[3584, 96]",   "U8[3072, 1792]", "U8[3072, 112]"};
    for (std::size_t i = 0; i < 6; ++i) {
        CHECK(tensors[i].name == prefix + names[i]);
        CHECK(shape_of(tensors, tensors[i].name) == shapes[i]);
    }
}

TEST_CASE("widths that coincide in the released model are kept apart") {
    // KDA and MLA have different head counts here; 96 x 128 each in the released model.
    auto config = load_config(test::golden_dir() / "tiny-k3");
    REQUIRE(config.has_value());
    auto kda = trunk_layer_tensors(*config, 1);
    auto mla = trunk_layer_tensors(*config, 3);
    CHECK(shape_of(kda, layer_tensor(1, "self_attn.o_proj.weight")) == "BF16[80, 48]");
    CHECK(shape_of(mla, layer_tensor(3, "self_attn.o_proj.weight")) == "BF16[80, 64]");
    CHECK(shape_of(kda, layer_tensor(1, "self_attn.A_log")) == "F32[16]");
    CHECK(shape_of(kda, layer_tensor(1, "self_attn.k_conv1d.weight")) == "F32[48, 1, 4]");
    CHECK(shape_of(mla, layer_tensor(3, "self_attn.kv_a_proj_with_mqa.weight")) == "BF16[40, 80]");
    CHECK(shape_of(mla, layer_tensor(3, "self_attn.A_log")) == "absent");
}

/// Edits the header of shard 1 and, alike, the index.
CheckpointCopy renamed(const std::string& from, const std::string& to) {
    CheckpointCopy copy(test::golden_dir() / "tiny-k3");
    copy.replace_text(kIndex, from, to);
    copy.edit_header(kShard1, [&](std::string header) {
        for (std::size_t at = header.find(from); at != std::string::npos; at = header.find(from))
            header.replace(at, from.size(), to);
        return header;
    });
    return copy;
}

Model open_renamed(const std::filesystem::path& directory) {
    auto model = open_model(directory);
    if (!model) FAIL(model.error().sentence());
    return std::move(model).value();
}

TEST_CASE("a checkpoint that lacks tensors is refused with their number and names") {
    CheckpointCopy copy = renamed("layers.0.mlp.", "layers.0.mlq.");
    Model model = open_renamed(copy.path());
    Status status = check_trunk_tensors(*model.checkpoint, model.config, 0, 13);
    REQUIRE(!status);
    CAPTURE(status.error().message);
    CHECK(status.error().code == ErrorCode::not_found);
    CHECK(status.error().message.find(copy.path().string() + " lacks 3 of ") == 0);
    for (const char* part : {"gate_proj", "up_proj", "down_proj"})
        CHECK(status.error().message.find(layer_tensor(0, "mlp.") + part) != std::string::npos);
    // A stage that does not hold layer 0 does not care.
    CHECK(check_trunk_tensors(*model.checkpoint, model.config, 1, 12).has_value());
}

TEST_CASE("a checkpoint that lacks more than three tensors names three and counts the rest") {
    CheckpointCopy copy = renamed("layers.1.block_sparse_moe.experts.", "layers.1.block_moe.e.");
    Model model = open_renamed(copy.path());
    Status status = check_expert_tensors(*model.checkpoint, model.config, 0, 13);
    REQUIRE(!status);
    CAPTURE(status.error().message);
    CHECK(status.error().message.find("lacks 144 of 1728 needed tensors") != std::string::npos);
    CHECK(status.error().message.ends_with(", ..."));
    CHECK(check_expert_tensors(*model.checkpoint, model.config, 2, 11).has_value());
}

TEST_CASE("a tensor of another type or shape is refused with both") {
    CheckpointCopy copy(test::golden_dir() / "tiny-k3");
    copy.edit_header(kShard1, [](std::string header) {
        auto edit = [&](const std::string& name, const std::string& from, const std::string& to) {
            std::size_t at = header.find(from, header.find("\"" + name + "\""));
            REQUIRE(at != std::string::npos);
            header.replace(at, from.size(), to);
        };
        // The same bytes: bf16 [80] as fp32 [40], and a transposed matrix.
        edit(layer_tensor(0, "input_layernorm.weight"), R"("BF16","shape":[80])",
             R"("F32","shape":[40])");
        edit(layer_tensor(0, "mlp.up_proj.weight"), "[176,80]", "[80,176]");
        return header;
    });
    Model model = open_renamed(copy.path());
    Status status = check_trunk_tensors(*model.checkpoint, model.config, 0, 1);
    REQUIRE(!status);
    CAPTURE(status.error().message);
    CHECK(status.error().code == ErrorCode::incompatible);
    CHECK(status.error().message.find("2 of 28 tensors have another type or shape") !=
          std::string::npos);
    CHECK(status.error().message.find("(is F32 [40], config.json calls for BF16 [80])") !=
          std::string::npos);
    CHECK(status.error().message.find(
              "(is BF16 [80, 176], config.json calls for BF16 [176, 80])") != std::string::npos);
}

}  // namespace
}  // namespace k3::model
