#include "common/model/config.h"

#include <fmt/format.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>
#include <utility>

#include "common/model/config_reader.h"
#include "common/storage/file.h"

namespace k3::model {

namespace {

using nlohmann::json;

constexpr std::uint64_t kMaxConfigBytes = std::uint64_t{1} << 20;  // released: some KiB
constexpr int kMaxDepth = 64;                                      // of nested JSON; released: 5

// Bounds far above any sensible model, low enough that no product of two sizes overflows 32 bits.
constexpr std::uint32_t kMaxWidth = 1U << 22;
constexpr std::uint32_t kMaxHeads = 4096;
constexpr std::uint32_t kMaxHeadDim = 4096;
constexpr std::uint32_t kMaxLayers = 4096;
constexpr std::uint32_t kMaxExperts = 65536;
constexpr std::uint32_t kMaxSharedExperts = 64;
constexpr std::uint32_t kMaxVocab = 1U << 26;
constexpr std::uint64_t kMaxPositions = std::uint64_t{1} << 40;
// The routed sum is exact in 64 bits while top_k * 2^18 * 2^40 stays below 2^63.
constexpr std::uint32_t kMaxTopK = 31;
constexpr std::uint32_t kMxfp4Group = 32;
constexpr double kTiny = 1e-12;

void read_top_level(ConfigReader& in, ModelConfig& config) {
    in.must_be("architectures", R"(["KimiK3ForConditionalGeneration"])");
    in.must_be("model_type", R"("kimi_k3")");
    config.bos_id = in.size("bos_token_id", 0, kMaxVocab);
    config.eos_id = in.size("eos_token_id", 0, kMaxVocab);
    config.pad_id = in.size("pad_token_id", 0, kMaxVocab);
    config.media_placeholder_id = in.size("media_placeholder_token_id", 0, kMaxVocab);
    in.must_be("tie_word_embeddings", "false");
}

/// Fields of which only the released value is built: the formulas for others are not written.
void check_fixed(ConfigReader& in) {
    in.must_be("text_config.model_type", R"("kimi_linear")");
    in.must_be("text_config.architectures", R"(["KimiLinearForCausalLM"])");
    in.must_be("text_config.hidden_act", R"("situ")");
    in.must_be("text_config.moe_layer_freq", "1");
    in.must_be("text_config.moe_router_activation_func", R"("sigmoid")");
    in.must_be("text_config.topk_method", R"("noaux_tc")");
    in.must_be("text_config.use_grouped_topk", "true");
    in.must_be("text_config.num_expert_group", "1");
    in.must_be("text_config.topk_group", "1");
    in.must_be("text_config.mla_use_nope", "true");
    in.must_be("text_config.mla_use_output_gate", "true");
    in.must_be("text_config.num_nextn_predict_layers", "0");
    in.must_be("text_config.tie_word_embeddings", "false");
    in.must_be("text_config.linear_attn_config.use_full_rank_gate", "true");
    in.must_equal("text_config.num_key_value_heads", "text_config.num_attention_heads");
    in.must_equal("text_config.bos_token_id", "bos_token_id");
    in.must_equal("text_config.eos_token_id", "eos_token_id");
    in.must_equal("text_config.pad_token_id", "pad_token_id");
}

/// What decides how an expert's bytes are read. `observer` is about how the weights were made, and
/// the `ignore` patterns contradict the release itself (the router gate matches none of them and is
/// bf16): whether a matrix is packed is seen from its tensors.
void check_quantization(ConfigReader& in) {
    const std::string base = "text_config.quantization_config.";
    const std::string group = base + "config_groups.group_0.";
    const std::string weights = group + "weights.";
    in.must_be(base + "quant_method", R"("compressed-tensors")");
    in.must_be(base + "format", R"("mxfp4-pack-quantized")");
    in.must_be(base + "quantization_status", R"("compressed")");
    in.must_be_null(base + "kv_cache_scheme");
    in.must_be_null(base + "global_compression_ratio");
    in.must_hold_only(base + "config_groups", "group_0");
    in.must_be(group + "format", R"("mxfp4-pack-quantized")");
    in.must_be(group + "targets", R"(["Linear"])");
    in.must_be_null(group + "input_activations");
    in.must_be_null(group + "output_activations");
    in.must_be(weights + "num_bits", "4");
    in.must_be(weights + "type", R"("float")");
    in.must_be(weights + "group_size", std::to_string(kMxfp4Group));
    in.must_be(weights + "strategy", R"("group")");
    in.must_be(weights + "symmetric", "true");
    in.must_be(weights + "dynamic", "false");
    in.must_be(weights + "scale_dtype", R"("torch.uint8")");
    in.must_be_null(weights + "zp_dtype");
    in.must_be_null(weights + "actorder");
    in.must_be_null(weights + "block_structure");
}

void read_sizes(ConfigReader& in, ModelConfig& config) {
    const std::string text = "text_config.";
    config.hidden_size = in.size(text + "hidden_size", 1, kMaxWidth);
    config.n_layers = in.size(text + "num_hidden_layers", 1, kMaxLayers);
    config.vocab_size = in.size(text + "vocab_size", 1, kMaxVocab);
    config.intermediate_size = in.size(text + "intermediate_size", 1, kMaxWidth);
    config.first_k_dense = in.size(text + "first_k_dense_replace", 0, kMaxLayers);
    config.attn_res_block = in.size(text + "attn_res_block_size", 1, kMaxLayers);
    config.max_positions = in.integer(text + "max_position_embeddings", 1, kMaxPositions);
    config.rms_norm_eps = in.number(text + "rms_norm_eps", kTiny, 0.1);
    config.situ_beta = in.number(text + "activation_situ_beta", 1e-3, 1e6);
    config.situ_linear_beta = in.number(text + "activation_situ_linear_beta", 1e-3, 1e6);
}

void read_mla(ConfigReader& in, MlaConfig& mla) {
    const std::string text = "text_config.";
    mla.n_heads = in.size(text + "num_attention_heads", 1, kMaxHeads);
    mla.q_lora_rank = in.size(text + "q_lora_rank", 1, kMaxWidth);
    mla.kv_lora_rank = in.size(text + "kv_lora_rank", 1, kMaxWidth);
    mla.qk_nope_head_dim = in.size(text + "qk_nope_head_dim", 1, kMaxHeadDim);
    mla.qk_rope_head_dim = in.size(text + "qk_rope_head_dim", 1, kMaxHeadDim);
    mla.v_head_dim = in.size(text + "v_head_dim", 1, kMaxHeadDim);
}

void read_kda(ConfigReader& in, KdaConfig& kda) {
    const std::string linear = "text_config.linear_attn_config.";
    kda.n_heads = in.size(linear + "num_heads", 1, kMaxHeads);
    kda.head_dim = in.size(linear + "head_dim", 1, kMaxHeadDim);
    kda.conv_kernel = in.size(linear + "short_conv_kernel_size", 1, 64);
    // Below zero: zero would mean no decay at all, and above zero the state grows without bound.
    kda.gate_lower_bound = in.number(linear + "gate_lower_bound", -1000, -1e-3);
}

void read_moe(ConfigReader& in, MoeConfig& moe) {
    const std::string text = "text_config.";
    moe.n_experts = in.size(text + "num_experts", 1, kMaxExperts);
    moe.top_k = in.size(text + "num_experts_per_token", 1, kMaxTopK);
    moe.latent_size = in.size(text + "routed_expert_hidden_size", 1, kMaxWidth);
    moe.moe_intermediate_size = in.size(text + "moe_intermediate_size", 1, kMaxWidth);
    moe.n_shared_experts = in.size(text + "num_shared_experts", 1, kMaxSharedExperts);
    moe.latent_norm = in.flag(text + "latent_moe_use_norm");
    moe.renormalize = in.flag(text + "moe_renormalize");
    moe.scaling_factor = in.number(text + "routed_scaling_factor", kTiny, 1e6);
}

struct LayerLists {
    std::vector<std::uint64_t> kda;  // one-based, as the file has them
    std::vector<std::uint64_t> mla;
};

LayerLists read_layer_lists(ConfigReader& in) {
    const std::string linear = "text_config.linear_attn_config.";
    return {in.integers(linear + "kda_layers"), in.integers(linear + "full_attn_layers")};
}

/// Every layer is in exactly one list.
void assign_layer_kinds(ConfigReader& in, const LayerLists& lists, ModelConfig& config) {
    std::vector<std::optional<LayerKind>> kinds(config.n_layers);
    auto assign = [&](const std::vector<std::uint64_t>& list, const char* name, LayerKind kind) {
        for (std::uint64_t one_based : list) {
            if (one_based < 1 || one_based > config.n_layers)
                in.contradiction(fmt::format("{} names layer {} (counting from one) of {}", name,
                                             one_based, config.n_layers));
            else if (auto& slot = kinds[one_based - 1]; slot.has_value())
                in.contradiction(
                    fmt::format("{} names layer {} (counting from one), which {} names already",
                                name, one_based, slot == kind ? name : "kda_layers"));
            else
                slot = kind;
        }
    };
    assign(lists.kda, "kda_layers", LayerKind::kda);
    assign(lists.mla, "full_attn_layers", LayerKind::mla);
    config.layer_kinds.clear();
    for (std::uint32_t layer = 0; layer < config.n_layers; ++layer) {
        if (!kinds[layer])
            in.contradiction(
                fmt::format("layer {} (counting from one) of {} is neither in "
                            "kda_layers nor in full_attn_layers",
                            layer + 1, config.n_layers));
        config.layer_kinds.push_back(kinds[layer].value_or(LayerKind::kda));
    }
}

/// Fields that are legal one by one and impossible together.
void check_together(ConfigReader& in, const ModelConfig& config) {
    const MoeConfig& moe = config.moe;
    if (moe.top_k > moe.n_experts)
        in.contradiction(fmt::format("num_experts_per_token {} exceeds num_experts {}", moe.top_k,
                                     moe.n_experts));
    if (config.first_k_dense >= config.n_layers)
        in.contradiction(fmt::format("first_k_dense_replace {} leaves none of {} layers to experts",
                                     config.first_k_dense, config.n_layers));
    auto multiple = [&](const char* name, std::uint32_t size) {
        if (size % kMxfp4Group != 0)
            in.contradiction(
                fmt::format("{} {} is no multiple of {}, the group that shares an "
                            "MXFP4 scale",
                            name, size, kMxfp4Group));
    };
    multiple("routed_expert_hidden_size", moe.latent_size);
    multiple("moe_intermediate_size", moe.moe_intermediate_size);
    // A_log has head_dim entries, of which the first num_heads count (spec 0.4, D3).
    if (config.kda.n_heads > config.kda.head_dim)
        in.contradiction(
            fmt::format("linear_attn_config.num_heads {} exceeds its head_dim {}, the "
                        "number of entries of A_log",
                        config.kda.n_heads, config.kda.head_dim));
    const std::pair<const char*, std::uint32_t> ids[] = {
        {"bos_token_id", config.bos_id},
        {"eos_token_id", config.eos_id},
        {"pad_token_id", config.pad_id},
        {"media_placeholder_token_id", config.media_placeholder_id}};
    for (const auto& [name, id] : ids)
        if (id >= config.vocab_size)
            in.contradiction(
                fmt::format("{} {} is not below vocab_size {}", name, id, config.vocab_size));
}

/// Parses and refuses a key that occurs twice in one object: which value counts would be a guess.
Result<json> parse_json(std::string_view text, const std::string& where) {
    std::vector<std::set<std::string>> open_objects;
    std::string twice;
    int deepest = 0;
    auto watch = [&](int depth, json::parse_event_t event, json& value) {
        deepest = std::max(deepest, depth);
        if (event == json::parse_event_t::object_start) open_objects.emplace_back();
        if (event == json::parse_event_t::object_end) open_objects.pop_back();
        if (event == json::parse_event_t::key &&
            !open_objects.back().insert(value.get<std::string>()).second)
            twice = value.get<std::string>();
        return true;
    };
    try {
        json root = json::parse(text, watch);
        if (!twice.empty())
            return Error{ErrorCode::incompatible,
                         fmt::format("{} has the field {} twice", where, twice),
                         "use the config.json that was released with this checkpoint"};
        if (deepest > kMaxDepth)  // printing such a value would exhaust the stack
            return Error{
                ErrorCode::incompatible,
                fmt::format("{} nests {} levels deep, more than {}", where, deepest, kMaxDepth),
                "use the config.json that was released with this checkpoint"};
        return root;
    } catch (const json::exception& e) {
        return Error{ErrorCode::corrupt, fmt::format("{} is not JSON: {}", where, e.what()),
                     "copy the file again from its source"};
    }
}

}  // namespace

Result<ModelConfig> parse_config(std::string_view text, const std::string& where) {
    ASSIGN_OR_RETURN(const json root, parse_json(text, where));
    ConfigReader in(root, where);
    ModelConfig config;
    read_top_level(in, config);
    read_sizes(in, config);
    read_mla(in, config.mla);
    read_kda(in, config.kda);
    read_moe(in, config.moe);
    LayerLists lists = read_layer_lists(in);
    check_fixed(in);
    check_quantization(in);
    RETURN_IF_ERROR(in.status());
    check_together(in, config);
    assign_layer_kinds(in, lists, config);
    RETURN_IF_ERROR(in.status());
    return config;
}

Status check_model_directory(const std::filesystem::path& directory) {
    RETURN_IF_ERROR(storage::check_checkpoint_directory(directory));
    // A link to nowhere is there, and opening it tells more.
    std::error_code error;
    const auto found = std::filesystem::symlink_status(directory / "config.json", error);
    if (found.type() != std::filesystem::file_type::not_found) return Status::ok();
    return Error{ErrorCode::not_found,
                 "checkpoint directory " + directory.string() + " has no config.json",
                 storage::kNameCheckpoint};
}

Result<ModelConfig> load_config(const std::filesystem::path& checkpoint_directory) {
    RETURN_IF_ERROR(check_model_directory(checkpoint_directory));
    const std::filesystem::path path = checkpoint_directory / "config.json";
    ASSIGN_OR_RETURN(std::string text, storage::read_text_file(path, kMaxConfigBytes));
    ASSIGN_OR_RETURN(ModelConfig config, parse_config(text, path.string()));
    std::error_code ignored;
    std::filesystem::path full =
        std::filesystem::absolute(checkpoint_directory, ignored).lexically_normal();
    config.name = full.has_filename() ? full.filename() : full.parent_path().filename();
    return config;
}

}  // namespace k3::model
