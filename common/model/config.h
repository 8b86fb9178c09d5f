#pragma once
// config.json of a Kimi K3 checkpoint, parsed and refused rather than guessed.
//
// Every field the spec marks Y (the forward pass depends on it), T (serving needs it) or C (must
// have the stated value) is required; absent ones are reported all together. Nothing has a default:
// the defaults of the reference code describe another model and would run silently.

#include <cstdint>
#include <filesystem>
#include <string>
#include <string_view>
#include <vector>

#include "common/base/result.h"

namespace k3::model {

enum class LayerKind : std::uint8_t { kda, mla };

/// How the latents and keys of MLA are kept: a setting of the trunk. bf16 takes half the memory and
/// is read in half the time; the output is another one than that of f32.
enum class MlaCache : std::uint8_t { f32, bf16 };
constexpr std::uint32_t value_bytes(MlaCache cache) noexcept {
    return cache == MlaCache::f32 ? 4 : 2;
}
/// "fp32" or "bf16", as settings and messages call it.
constexpr std::string_view to_string(MlaCache cache) noexcept {
    return cache == MlaCache::f32 ? "fp32" : "bf16";
}

struct KdaConfig {
    std::uint32_t n_heads = 0;
    std::uint32_t head_dim = 0;  // of keys and values, and rank of the decay projection
    std::uint32_t conv_kernel = 0;
    float gate_lower_bound = 0;
    std::uint32_t width() const noexcept { return n_heads * head_dim; }
};

struct MlaConfig {
    std::uint32_t n_heads = 0;
    std::uint32_t q_lora_rank = 0;
    std::uint32_t kv_lora_rank = 0;
    std::uint32_t qk_nope_head_dim = 0;
    std::uint32_t qk_rope_head_dim = 0;
    std::uint32_t v_head_dim = 0;
    // Settings, not in config.json (spec D1).
    float lora_norm_eps = 1e-6F;
    MlaCache cache = MlaCache::f32;
    std::uint32_t width() const noexcept { return n_heads * v_head_dim; }
    /// Of a position in one layer's cache: its latent and its shared key.
    std::uint64_t cache_bytes() const noexcept {
        return (std::uint64_t{kv_lora_rank} + qk_rope_head_dim) * value_bytes(cache);
    }
};

struct MoeConfig {
    std::uint32_t n_experts = 0;
    std::uint32_t top_k = 0;
    std::uint32_t latent_size = 0;            // routed_expert_hidden_size
    std::uint32_t moe_intermediate_size = 0;  // of one routed expert
    std::uint32_t n_shared_experts = 0;
    bool latent_norm = true;
    bool renormalize = true;
    float scaling_factor = 1.0F;
    std::uint32_t shared_width() const noexcept { return n_shared_experts * moe_intermediate_size; }
};

struct ModelConfig {
    std::string name;  // of the checkpoint directory, for people
    std::uint32_t hidden_size = 0;
    std::uint32_t n_layers = 0;
    std::uint32_t vocab_size = 0;
    std::uint32_t intermediate_size = 0;  // dense FFN
    std::uint32_t first_k_dense = 0;      // layers below have the dense FFN
    std::uint32_t attn_res_block = 0;
    std::uint64_t max_positions = 0;
    float rms_norm_eps = 0;
    float situ_beta = 0;
    float situ_linear_beta = 0;
    std::uint32_t bos_id = 0;
    std::uint32_t eos_id = 0;
    std::uint32_t pad_id = 0;
    std::uint32_t media_placeholder_id = 0;
    KdaConfig kda;
    MlaConfig mla;
    MoeConfig moe;
    std::vector<LayerKind> layer_kinds;  // [n_layers], zero-based (the file counts from one)

    bool is_moe(std::uint32_t layer) const noexcept { return layer >= first_k_dense; }
    /// True where a snapshot is taken before the layer's attention.
    bool takes_snapshot(std::uint32_t layer) const noexcept { return layer % attn_res_block == 0; }
    /// Snapshots that exist when `layer` is entered (before it may take one).
    std::uint32_t snapshots_before(std::uint32_t layer) const noexcept {
        return (layer + attn_res_block - 1) / attn_res_block;
    }
    /// Vectors of one row on the wire at a cut before `layer`: snapshots and the prefix sum.
    std::uint32_t vectors_before(std::uint32_t layer) const noexcept {
        return snapshots_before(layer) + 1;
    }
};

/// Errors: not_found, in the same words wherever a checkpoint is named: nothing there, no
/// directory, or one without config.json.
Status check_model_directory(const std::filesystem::path& directory);

/// Errors: not_found, io, corrupt (not JSON), incompatible (absent fields, all named together with
/// the file; a field of the wrong type; a checked field with another value, both named; fields
/// that contradict each other, e.g. a layer that is both KDA and MLA or neither).
Result<ModelConfig> load_config(const std::filesystem::path& checkpoint_directory);
Result<ModelConfig> parse_config(std::string_view json, const std::string& where);

}  // namespace k3::model
