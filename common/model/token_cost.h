#pragma once
// What one token costs: weights read and arithmetic. Spec section 5.

#include <cstdint>

#include "common/model/config.h"

namespace k3::model {

struct TokenCost {
    std::uint64_t trunk_bytes = 0;   // a decode step: every layer, the head, a row of embedding
    std::uint64_t expert_bytes = 0;  // the top_k routed experts of every MoE layer
    std::uint64_t row_flops = 0;     // products with matrices of a row, without the head
    std::uint64_t head_flops = 0;    // of a row whose logits are wanted
};

/// Two operations for each weight of a matrix that a row meets; attention over the context, norms
/// and other element-wise work are not counted.
TokenCost token_cost(const ModelConfig& config);

}  // namespace k3::model
