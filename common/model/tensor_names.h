#pragma once
// Which tensors a Kimi K3 checkpoint holds: names, shapes, types. Spec section 2.3.

#include <array>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "common/base/result.h"
#include "common/model/config.h"
#include "common/storage/checkpoint.h"

namespace k3::model {

using storage::TensorSpec;

inline constexpr std::string_view kEmbeddingTensor = "language_model.model.embed_tokens.weight";
inline constexpr std::string_view kHeadTensor = "language_model.lm_head.weight";

/// "language_model.model.layers.L.<rest>".
std::string layer_tensor(std::uint32_t layer, std::string_view rest);

/// Everything of one layer except routed experts, in a fixed order.
std::vector<TensorSpec> trunk_layer_tensors(const ModelConfig& config, std::uint32_t layer);
/// Embedding, final norm, output attention residual, lm_head.
std::vector<TensorSpec> model_level_tensors(const ModelConfig& config);

/// The six tensors of one routed expert in the order w1.packed, w1.scale, w2.packed, w2.scale,
/// w3.packed, w3.scale (w1 = gate, w3 = up, w2 = down).
enum class ExpertPart : std::uint8_t {
    w1_packed,
    w1_scale,
    w2_packed,
    w2_scale,
    w3_packed,
    w3_scale
};
std::array<TensorSpec, 6> expert_tensors(const ModelConfig& config, std::uint32_t layer,
                                         std::uint32_t expert);

/// Bytes of one routed expert, all six tensors.
std::uint64_t expert_bytes(const ModelConfig& config) noexcept;

/// Checks that the checkpoint holds every tensor the config calls for, with the right type and
/// shape: trunk tensors of layers [first, first + count) and model-level ones, or the experts of
/// those layers. All problems of one kind are reported in one sentence (first three names, count).
Status check_trunk_tensors(const storage::Checkpoint& checkpoint, const ModelConfig& config,
                           std::uint32_t first, std::uint32_t count);
Status check_expert_tensors(const storage::Checkpoint& checkpoint, const ModelConfig& config,
                            std::uint32_t first, std::uint32_t count);

/// The checkpoint's fingerprint: XXH3-128, as 32 hex digits, over
///   1. the line "k3 fingerprint 2";
///   2. the parsed config as lines "field=value", floats by their bits: everything in ModelConfig
///   but
///      `name`, `mla.lora_norm_eps` and `mla.cache` (settings, not part of the checkpoint);
///   3. the sum, modulo 2^128, of the XXH3-128 of a line "name dtype sizes..." for every text
///      tensor: whatever order they come in;
///   4. the middle 4096 bytes (or all, if there are fewer) of each layer's self_attn.o_proj.weight,
///      of the embedding and of the head, in this order.
/// How the tensors are spread over shards does not matter, and neither do bytes outside the
/// samples: it tells checkpoints apart, it does not prove them intact. Design section 5. Errors:
/// not_found (a sampled tensor), corrupt, io.
Result<std::string> fingerprint(const storage::Checkpoint& checkpoint, const ModelConfig& config);

/// The same for a process that has no use for the tensors: reads one shard's header after the
/// other, 5 MB of memory for the released checkpoint instead of 160. That index and headers agree
/// is not checked. Errors: those of storage::visit_shards, and as above.
Result<std::string> fingerprint(const std::filesystem::path& directory, const ModelConfig& config);

/// XXH3-128 over part 2 alone, as 32 hex digits: what can be compared where there are no shards.
std::string config_digest(const ModelConfig& config);

}  // namespace k3::model
