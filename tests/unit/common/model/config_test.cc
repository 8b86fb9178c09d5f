// config.json: what is parsed, and that nothing is guessed.

#include "common/model/config.h"

#include <doctest/doctest.h>

#include <nlohmann/json.hpp>
#include <set>
#include <string>
#include <vector>

#include "tests/support/checkpoint_copy.h"
#include "tests/support/golden.h"
#include "tests/support/needed_fields.h"

namespace k3::model {
namespace {

using nlohmann::json;

json golden_config(const char* model = "tiny-k3") {
    return json::parse(test::read_file(test::golden_dir() / model / "config.json"));
}

/// As errors spell it: "/text_config/hidden_size" -> "text_config.hidden_size".
std::string dotted(std::string pointer) {
    pointer.erase(0, 1);
    for (char& c : pointer)
        if (c == '/') c = '.';
    return pointer;
}

void erase(json& config, const std::string& pointer) {
    json::json_pointer field(pointer);
    config[field.parent_pointer()].erase(field.back());
}

Error refused(const json& config) {
    Result<ModelConfig> parsed = parse_config(config.dump(), "the config");
    if (parsed.has_value()) FAIL("was accepted");
    CHECK(!parsed.error().remedy.empty());
    return parsed.error();
}

/// The config with one field changed must be refused as incompatible, saying all of `parts`.
void check_refused(const json& config, const std::vector<std::string>& parts) {
    Error error = refused(config);
    CAPTURE(error.message);
    CHECK(error.code == ErrorCode::incompatible);
    CHECK(exit_code(error.code) == kExitModel);
    for (const std::string& part : parts) {
        CAPTURE(part);
        CHECK(error.message.find(part) != std::string::npos);
    }
}

TEST_CASE("the golden config gives the sizes of the golden model") {
    auto parsed = load_config(test::golden_dir() / "tiny-k3");
    REQUIRE(parsed.has_value());
    const ModelConfig& c = *parsed;
    CHECK(c.name == "tiny-k3");
    CHECK(c.hidden_size == 80);
    CHECK(c.n_layers == 13);
    CHECK(c.vocab_size == 768);
    CHECK(c.intermediate_size == 176);
    CHECK(c.first_k_dense == 1);
    CHECK(c.attn_res_block == 3);
    CHECK(c.max_positions == 4096);
    CHECK(c.rms_norm_eps == 1e-5F);
    CHECK(c.situ_beta == 4.0F);
    CHECK(c.situ_linear_beta == 25.0F);
    CHECK(c.bos_id == 512);
    CHECK(c.eos_id == 514);
    CHECK(c.pad_id == 767);
    CHECK(c.media_placeholder_id == 533);
    CHECK(c.kda.n_heads == 3);
    CHECK(c.kda.head_dim == 16);
    CHECK(c.kda.conv_kernel == 4);
    CHECK(c.kda.gate_lower_bound == -5.0F);
    CHECK(c.mla.n_heads == 4);
    CHECK(c.mla.q_lora_rank == 56);
    CHECK(c.mla.kv_lora_rank == 32);
    CHECK(c.mla.qk_nope_head_dim == 24);
    CHECK(c.mla.qk_rope_head_dim == 8);
    CHECK(c.mla.v_head_dim == 16);
    CHECK(c.mla.lora_norm_eps == 1e-6F);
    CHECK(c.moe.n_experts == 24);
    CHECK(c.moe.top_k == 4);
    CHECK(c.moe.latent_size == 64);
    CHECK(c.moe.moe_intermediate_size == 96);
    CHECK(c.moe.n_shared_experts == 2);
    CHECK(c.moe.shared_width() == 192);
    CHECK(c.moe.latent_norm);
    CHECK(c.moe.renormalize);
    CHECK(c.moe.scaling_factor == 1.0F);
    // The file counts layers from one: 4, 8, 12 and 13 are MLA.
    const std::set<std::uint32_t> mla = {3, 7, 11, 12};
    REQUIRE(c.layer_kinds.size() == 13);
    for (std::uint32_t layer = 0; layer < 13; ++layer)
        CHECK((c.layer_kinds[layer] == LayerKind::mla) == mla.contains(layer));
}

TEST_CASE("snapshots are counted as the forward pass takes them") {
    auto parsed = load_config(test::golden_dir() / "tiny-k3");
    REQUIRE(parsed.has_value());
    std::uint32_t taken = 0;
    for (std::uint32_t layer = 0; layer < parsed->n_layers; ++layer) {
        CHECK(parsed->snapshots_before(layer) == taken);
        CHECK(parsed->vectors_before(layer) == taken + 1);
        if (parsed->takes_snapshot(layer)) ++taken;
    }
    CHECK(parsed->snapshots_before(parsed->n_layers) == 5);
    CHECK(!parsed->is_moe(0));
    CHECK(parsed->is_moe(1));
}

TEST_CASE("each needed field is missed by name when it is removed") {
    for (const std::string& field : test::needed_fields()) {
        CAPTURE(field);
        json config = golden_config();
        REQUIRE(config.contains(json::json_pointer(field)));
        erase(config, field);
        check_refused(config, {"the config lacks 1 needed field: " + dotted(field)});
    }
}

TEST_CASE("no field but the needed ones is needed") {
    json config = golden_config();
    const std::set<std::string> needed(test::needed_fields().begin(), test::needed_fields().end());
    auto is_needed = [&](const std::string& pointer) {
        // A list's items belong to the list.
        for (std::string at = pointer; !at.empty(); at = at.substr(0, at.rfind('/')))
            if (needed.contains(at)) return true;
        return false;
    };
    int n_removed = 0;
    const json leaves = config.flatten();
    for (const auto& [pointer, value] : leaves.items()) {
        json::json_pointer field(pointer);
        if (is_needed(pointer) || !config.contains(field)) continue;
        if (config[field.parent_pointer()].is_array()) field = field.parent_pointer();
        erase(config, field.to_string());
        ++n_removed;
    }
    CHECK(n_removed > 20);
    auto parsed = parse_config(config.dump(), "the config");
    CHECK_MESSAGE(parsed.has_value(), (parsed ? "" : parsed.error().message));
}

TEST_CASE("all absent fields are named together") {
    json config = golden_config();
    for (const std::string& field : test::needed_fields()) erase(config, field);
    Error error = refused(config);
    CHECK(error.message.find("lacks " + std::to_string(test::needed_fields().size()) +
                             " needed fields: ") != std::string::npos);
    for (const std::string& field : test::needed_fields())
        CHECK(error.message.find(dotted(field)) != std::string::npos);
    CHECK(refused(json::object()).code == ErrorCode::incompatible);
    CHECK(refused(json::array()).code == ErrorCode::incompatible);
}

TEST_CASE("a field of the wrong type is refused by name, whatever it is") {
    for (const std::string& field : test::needed_fields()) {
        for (const json& value : {json(nullptr), json("x"), json(-3), json(1.5), json::object(),
                                  json::array({"x"}), json::array({json::array()})}) {
            CAPTURE(field);
            CAPTURE(value.dump());
            json config = golden_config();
            if (config[json::json_pointer(field)].is_number_float() && value == json(1.5)) continue;
            if (field.ends_with("gate_lower_bound") && value == json(-3)) continue;  // legal
            config[json::json_pointer(field)] = value;
            check_refused(config, {dotted(field).substr(dotted(field).rfind('.') + 1)});
        }
    }
}

TEST_CASE("where only the released value is built, another is refused with both") {
    const std::vector<std::pair<std::string, json>> others = {
        {"/architectures", {"LlamaForCausalLM"}},
        {"/model_type", "kimi_k2"},
        {"/tie_word_embeddings", true},
        {"/text_config/model_type", "deepseek_v3"},
        {"/text_config/architectures", {"DeepseekV3ForCausalLM"}},
        {"/text_config/hidden_act", "silu"},
        {"/text_config/moe_layer_freq", 2},
        {"/text_config/moe_router_activation_func", "softmax"},
        {"/text_config/topk_method", "greedy"},
        {"/text_config/use_grouped_topk", false},
        {"/text_config/num_expert_group", 8},
        {"/text_config/topk_group", 4},
        {"/text_config/mla_use_nope", false},
        {"/text_config/mla_use_output_gate", false},
        {"/text_config/num_nextn_predict_layers", 1},
        {"/text_config/num_key_value_heads", 2},
        {"/text_config/tie_word_embeddings", true},
        {"/text_config/linear_attn_config/use_full_rank_gate", false},
        {"/text_config/quantization_config/quant_method", "gptq"},
        {"/text_config/quantization_config/format", "nvfp4-pack-quantized"},
        {"/text_config/quantization_config/quantization_status", "frozen"},
        {"/text_config/quantization_config/kv_cache_scheme", "fp8"},
        {"/text_config/quantization_config/global_compression_ratio", 2.0},
        {"/text_config/quantization_config/config_groups/group_0/format", "pack-quantized"},
        {"/text_config/quantization_config/config_groups/group_0/targets", {"Embedding"}},
        {"/text_config/quantization_config/config_groups/group_0/input_activations", "fp8"},
        {"/text_config/quantization_config/config_groups/group_0/output_activations", "fp8"},
        {"/text_config/quantization_config/config_groups/group_0/weights/num_bits", 8},
        {"/text_config/quantization_config/config_groups/group_0/weights/type", "int"},
        {"/text_config/quantization_config/config_groups/group_0/weights/group_size", 16},
        {"/text_config/quantization_config/config_groups/group_0/weights/strategy", "channel"},
        {"/text_config/quantization_config/config_groups/group_0/weights/symmetric", false},
        {"/text_config/quantization_config/config_groups/group_0/weights/dynamic", true},
        {"/text_config/quantization_config/config_groups/group_0/weights/scale_dtype", "fp8"},
        {"/text_config/quantization_config/config_groups/group_0/weights/zp_dtype", "torch.int8"},
        {"/text_config/quantization_config/config_groups/group_0/weights/actorder", "group"},
        {"/text_config/quantization_config/config_groups/group_0/weights/block_structure", "8x8"},
    };
    for (const auto& [other_field, value] : others) {
        const std::string& field = other_field;  // clang 14 captures no bindings
        CAPTURE(field);
        json config = golden_config();
        json::json_pointer at(field);
        REQUIRE(config.contains(at));
        json released = config[at];
        config[at] = value;
        check_refused(config, {dotted(field), value.dump(), released.dump()});
    }
    json config = golden_config();
    config["text_config"]["quantization_config"]["config_groups"]["group_1"] = json::object();
    check_refused(config, {"config_groups", "group_0"});
}

TEST_CASE("a number out of range is refused with the range") {
    const std::vector<std::pair<std::string, json>> bad = {
        {"hidden_size", 0},
        {"hidden_size", 5'000'000},
        {"num_hidden_layers", 0},
        {"vocab_size", 0},
        {"intermediate_size", 0},
        {"attn_res_block_size", 0},
        {"max_position_embeddings", 0},
        {"num_attention_heads", 0},
        {"q_lora_rank", 0},
        {"kv_lora_rank", 0},
        {"qk_nope_head_dim", 0},
        {"qk_rope_head_dim", 0},
        {"v_head_dim", 0},
        {"num_experts", 0},
        {"num_experts_per_token", 0},
        {"num_experts_per_token", 32},
        {"num_shared_experts", 0},
        {"moe_intermediate_size", 0},
        {"routed_expert_hidden_size", 0},
        {"rms_norm_eps", 0},
        {"rms_norm_eps", 1},
        {"activation_situ_beta", 0},
        {"activation_situ_linear_beta", -25.0},
        {"routed_scaling_factor", 0.0},
        {"hidden_size", 18446744073709551615ULL},
    };
    for (const auto& [bad_field, bad_value] : bad) {
        const std::string& field = bad_field;  // clang 14 captures no bindings
        const json& value = bad_value;
        CAPTURE(field);
        CAPTURE(value.dump());
        json config = golden_config();
        config["text_config"][field] = value;
        check_refused(config, {"text_config." + field + " is " + value.dump(), " from "});
    }
    for (const char* field : {"num_heads", "head_dim", "short_conv_kernel_size"}) {
        json config = golden_config();
        config["text_config"]["linear_attn_config"][field] = 0;
        check_refused(config, {std::string(field) + " is 0"});
    }
    json config = golden_config();
    config["text_config"]["linear_attn_config"]["gate_lower_bound"] = 0.0;
    check_refused(config, {"gate_lower_bound is 0.0"});
}

TEST_CASE("layer lists that overlap, leave a gap or leave the model are refused") {
    auto with_lists = [](const std::vector<int>& kda, const std::vector<int>& mla) {
        json config = golden_config();
        config["text_config"]["num_hidden_layers"] = 4;
        config["text_config"]["linear_attn_config"]["kda_layers"] = kda;
        config["text_config"]["linear_attn_config"]["full_attn_layers"] = mla;
        return config;
    };
    CHECK(parse_config(with_lists({1, 2, 3}, {4}).dump(), "x").has_value());
    CHECK(parse_config(with_lists({3, 2, 1}, {4}).dump(), "x").has_value());
    check_refused(with_lists({1, 2, 3}, {3, 4}),
                  {"full_attn_layers names layer 3 (counting from one), which kda_layers names"});
    check_refused(with_lists({1, 2, 2, 3}, {4}),
                  {"kda_layers names layer 2 (counting from one), which kda_layers names already"});
    check_refused(with_lists({1, 2}, {4}), {"layer 3 (counting from one) of 4 is neither"});
    check_refused(with_lists({1, 2, 3}, {4, 5}), {"full_attn_layers names layer 5"});
    // Zero-based lists, the likely mistake of a converter.
    check_refused(with_lists({0, 1, 2}, {3}), {"kda_layers names layer 0", "layer 4"});
}

TEST_CASE("fields that are legal alone and impossible together are refused") {
    auto with = [](const std::vector<std::pair<std::string, json>>& changes) {
        json config = golden_config();
        for (const auto& [pointer, value] : changes) config[json::json_pointer(pointer)] = value;
        return config;
    };
    check_refused(with({{"/text_config/num_experts", 3}}),
                  {"num_experts_per_token 4 exceeds num_experts 3"});
    check_refused(with({{"/text_config/first_k_dense_replace", 13}}),
                  {"first_k_dense_replace 13 leaves none of 13 layers"});
    check_refused(with({{"/text_config/routed_expert_hidden_size", 80}}),
                  {"routed_expert_hidden_size 80 is no multiple of 32"});
    check_refused(with({{"/text_config/moe_intermediate_size", 100}}),
                  {"moe_intermediate_size 100 is no multiple of 32"});
    check_refused(with({{"/text_config/linear_attn_config/num_heads", 17}}),
                  {"num_heads 17 exceeds its head_dim 16"});
    check_refused(with({{"/media_placeholder_token_id", 768}}),
                  {"media_placeholder_token_id 768 is not below vocab_size 768"});
    for (const std::string id : {"bos_token_id", "eos_token_id", "pad_token_id"}) {
        check_refused(with({{"/" + id, 800}, {"/text_config/" + id, 800}}),
                      {id + " 800 is not below vocab_size 768"});
        check_refused(with({{"/" + id, 7}}),
                      {"text_config." + id, " and " + id + " is 7, and they must be equal"});
    }
}

TEST_CASE("a file that is no JSON, too large, too deep or says a thing twice is refused") {
    auto parse = [](const std::string& text) { return parse_config(text, "the config"); };
    for (const char* text : {"", "{", "nonsense", "{\"a\": }", "\xff"}) {
        auto parsed = parse(text);
        REQUIRE(!parsed);
        CHECK(parsed.error().code == ErrorCode::corrupt);
        CHECK(parsed.error().message.find("the config is not JSON") != std::string::npos);
    }
    auto deep =
        parse("{\"model_type\": " + std::string(100'000, '[') + std::string(100'000, ']') + "}");
    REQUIRE(!deep);
    CHECK(deep.error().message.find("levels deep") != std::string::npos);

    test::CheckpointCopy copy(test::golden_dir() / "tiny-k3");
    copy.replace_text("config.json", "\"hidden_size\": 80",
                      "\"hidden_size\": 80, \"hidden_size\": 96");
    auto twice = load_config(copy.path());
    REQUIRE(!twice);
    CHECK(twice.error().code == ErrorCode::incompatible);
    CHECK(twice.error().message == copy.config().string() + " has the field hidden_size twice");

    test::write_file(copy.config(), std::string((1 << 20) + 1, ' '));
    auto large = load_config(copy.path());
    REQUIRE(!large);
    CHECK(large.error().message.find("has 1048577 bytes, more than the 1048576") !=
          std::string::npos);

    copy.remove("config.json");
    auto absent = load_config(copy.path());
    REQUIRE(!absent);
    CHECK(absent.error().code == ErrorCode::not_found);
    CHECK(absent.error().message ==
          "checkpoint directory " + copy.path().string() + " has no config.json");
}

TEST_CASE("the checkpoint's name is its directory's, however the path is written") {
    const auto root = test::golden_dir();
    for (const auto& path : {root / "tiny-k3", root / "tiny-k3" / "",
                             root / "expected" / ".." / "tiny-k3", root / "tiny-k3" / "."}) {
        CAPTURE(path);
        auto parsed = load_config(path);
        REQUIRE(parsed.has_value());
        CHECK(parsed->name == "tiny-k3");
    }
}

}  // namespace
}  // namespace k3::model
