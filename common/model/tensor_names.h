#pragma once
// Which tensors a Kimi K3 checkpoint holds: names, shapes, types. Spec section 2.3.

#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "common/base/result.h"
#include "common/model/config.h"
#include "common/storage/checkpoint.h"

namespace k3::model {

struct TensorSpec {
    std::string name;
    storage::DType dtype;
    std::vector<std::uint64_t> shape;
};

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

/// The checkpoint's fingerprint, 32 hex digits: a digest of the parsed config, of every text
/// tensor's name, type and shape, and of 4 KiB from one trunk matrix of each layer, the embedding
/// and the head. Design section 5.
Result<std::string> fingerprint(const storage::Checkpoint& checkpoint, const ModelConfig& config);

}  // namespace k3::model
