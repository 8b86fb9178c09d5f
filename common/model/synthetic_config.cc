#include "common/model/synthetic_config.h"

#include <nlohmann/json.hpp>
#include <string_view>
#include <vector>

namespace k3::model {

namespace {

using Json = nlohmann::json;

constexpr std::uint32_t kSpecialSlots = 256;
constexpr std::uint32_t kReleasedLayers = 93;

/// Special tokens by their place after the ranks. Spec section 4.
struct SpecialToken {
    std::uint32_t slot;
    const char* spelling;
    bool special;
};
constexpr SpecialToken kSpecialTokens[] = {
    {0, "[BOS]", true},
    {1, "[EOS]", true},
    {2, "<|end_of_msg|>", true},
    {3, "<|open|>", false},
    {4, "<|close|>", false},
    {5, "<|sep|>", false},
    {6, "[start_header_id]", true},
    {7, "[end_header_id]", true},
    {9, "[EOT]", true},
    {18, "<|media_begin|>", true},
    {19, "<|media_content|>", true},
    {20, "<|media_end|>", true},
    {21, "<|media_pad|>", true},
    {65, "<osagent_mode>", true},
    {254, "[UNK]", true},
    {255, "[PAD]", true},
};

Json linear_attention(std::uint32_t n_layers) {
    Json full = Json::array();
    Json kda = Json::array();
    for (std::uint32_t layer = 1; layer <= n_layers; ++layer)  // the lists count from one
        (layer % 4 == 0 || layer == kReleasedLayers ? full : kda).push_back(layer);
    return {{"full_attn_layers", full},  {"kda_layers", kda},           {"num_heads", 96},
            {"head_dim", 128},           {"short_conv_kernel_size", 4}, {"gate_lower_bound", -5.0},
            {"use_full_rank_gate", true}};
}

Json quantization() {
    const Json weights = {{"num_bits", 4},        {"type", "float"},
                          {"group_size", 32},     {"strategy", "group"},
                          {"symmetric", true},    {"dynamic", false},
                          {"observer", "minmax"}, {"scale_dtype", "torch.uint8"}};
    const Json group = {{"format", "mxfp4-pack-quantized"},
                        {"targets", {"Linear"}},
                        {"weights", weights},
                        {"input_activations", nullptr},
                        {"output_activations", nullptr}};
    return {
        {"quant_method", "compressed-tensors"},
        {"format", "mxfp4-pack-quantized"},
        {"quantization_status", "compressed"},
        {"config_groups", {{"group_0", group}}},
        {"kv_cache_scheme", nullptr},
        {"global_compression_ratio", nullptr},
        {"ignore",
         {"re:.*self_attn.*", "re:.*shared_experts.*", "re:.*mlp\\.(gate|up|gate_up|down)_proj.*",
          "re:.*lm_head.*", "re:.*vision_tower.*", "re:.*mm_projector.*"}}};
}

std::string base64(std::string_view bytes) {
    constexpr std::string_view kDigits =
        "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    std::string text;
    for (std::size_t i = 0; i < bytes.size(); i += 3) {
        std::uint32_t word = 0;
        for (std::size_t b = 0; b < 3; ++b)
            word =
                word << 8U | (i + b < bytes.size() ? static_cast<unsigned char>(bytes[i + b]) : 0U);
        const std::size_t n = std::min<std::size_t>(3, bytes.size() - i);
        for (std::size_t d = 0; d < 4; ++d)
            text += d <= n ? kDigits[word >> (18 - 6 * d) & 63U] : '=';
    }
    return text;
}

}  // namespace

std::string synthetic_config_json(std::uint32_t n_layers, std::uint32_t n_experts,
                                  std::uint32_t vocab_size) {
    const std::uint32_t first_special = vocab_size - kSpecialSlots;
    const Json ids = {{"bos_token_id", first_special},
                      {"eos_token_id", first_special + 2},
                      {"pad_token_id", vocab_size - 1}};
    Json text = {{"model_type", "kimi_linear"},
                 {"architectures", {"KimiLinearForCausalLM"}},
                 {"hidden_size", 7168},
                 {"num_hidden_layers", n_layers},
                 {"vocab_size", vocab_size},
                 {"num_attention_heads", 96},
                 {"num_key_value_heads", 96},
                 {"intermediate_size", 33792},
                 {"hidden_act", "situ"},
                 {"activation_situ_beta", 4.0},
                 {"activation_situ_linear_beta", 25.0},
                 {"rms_norm_eps", 1e-5},
                 {"attn_res_block_size", 12},
                 {"first_k_dense_replace", 1},
                 {"moe_layer_freq", 1},
                 {"num_experts", n_experts},
                 {"num_experts_per_token", 16},
                 {"moe_intermediate_size", 3072},
                 {"routed_expert_hidden_size", 3584},
                 {"latent_moe_use_norm", true},
                 {"num_shared_experts", 2},
                 {"moe_router_activation_func", "sigmoid"},
                 {"moe_renormalize", true},
                 {"routed_scaling_factor", 1.0},
                 {"topk_method", "noaux_tc"},
                 {"use_grouped_topk", true},
                 {"num_expert_group", 1},
                 {"topk_group", 1},
                 {"q_lora_rank", 1536},
                 {"kv_lora_rank", 512},
                 {"qk_nope_head_dim", 128},
                 {"qk_rope_head_dim", 64},
                 {"v_head_dim", 128},
                 {"mla_use_nope", true},
                 {"mla_use_output_gate", true},
                 {"max_position_embeddings", 1048576},
                 {"num_nextn_predict_layers", 0},
                 {"tie_word_embeddings", false},
                 {"dtype", "bfloat16"},
                 {"linear_attn_config", linear_attention(n_layers)},
                 {"quantization_config", quantization()}};
    text.update(ids);
    Json config = {{"architectures", {"KimiK3ForConditionalGeneration"}},
                   {"model_type", "kimi_k3"},
                   {"dtype", "bfloat16"},
                   {"media_placeholder_token_id", first_special + 21},
                   {"tie_word_embeddings", false},
                   {"text_config", text}};
    config.update(ids);
    return config.dump(2) + "\n";
}

std::string synthetic_ranks(std::uint32_t vocab_size) {
    std::string text;
    for (std::uint32_t rank = 0; rank < vocab_size - kSpecialSlots; ++rank) {
        std::string token(1, static_cast<char>(rank & 0xFFU));
        if (rank >= 256) {  // two letters, and more once those have run out
            const std::uint32_t pair = rank - 256;
            token = {static_cast<char>('a' + pair % 26), static_cast<char>('a' + pair / 26 % 26)};
            for (std::uint32_t more = pair / 676; more > 0; more /= 26)
                token += static_cast<char>('a' + more % 26);
        }
        text += base64(token) + " " + std::to_string(rank) + "\n";
    }
    return text;
}

std::string synthetic_tokenizer_config(std::uint32_t vocab_size) {
    Json tokens = Json::object();
    for (const SpecialToken& token : kSpecialTokens)
        tokens[std::to_string(vocab_size - kSpecialSlots + token.slot)] = {
            {"content", token.spelling}, {"lstrip", false},      {"normalized", false},
            {"rstrip", false},           {"single_word", false}, {"special", token.special}};
    const Json config = {
        {"added_tokens_decoder", tokens}, {"bos_token", "[BOS]"},
        {"eos_token", "[EOS]"},           {"pad_token", "[PAD]"},
        {"unk_token", "[UNK]"},           {"tokenizer_class", "TikTokenTokenizer"}};
    return config.dump(2) + "\n";
}

}  // namespace k3::model
