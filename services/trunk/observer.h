#pragma once
// A look inside a step, for tests and recordings. Null by default; costs nothing then.

#include <cstddef>
#include <cstdint>
#include <span>

namespace k3::trunk {

/// Rows of vectors: row r begins at data + r * stride. Valid during the call.
struct RowsView {
    const float* data = nullptr;
    std::size_t n_rows = 0;
    std::size_t width = 0;
    std::size_t stride = 0;
    std::span<const float> row(std::size_t r) const noexcept { return {data + r * stride, width}; }
};

enum class Site : std::uint8_t {
    embedding,      // row of the embedding matrix (layer 0)
    attention_in,   // after mix and input_layernorm
    attention_out,  // before it is added to the prefix
    mlp_in,         // after mix and post_attention_layernorm
    mlp_out,        // before it is added to the prefix
    layer_out,      // the prefix sum handed to the next layer
    output_mix,     // after the last layer, wanted rows only
    final_norm,     // what lm_head sees, wanted rows only
};

enum class MixSite : std::uint8_t { attention, mlp, output };

struct RoutingView {
    std::size_t n_rows = 0;
    std::size_t top_k = 0;
    std::size_t n_experts = 0;
    const std::uint32_t* ids = nullptr;  // [n_rows, top_k], descending biased score
    const float* weights = nullptr;      // [n_rows, top_k]
    const float* scores = nullptr;       // [n_rows, n_experts], sigmoid without the bias
};

/// Called on the thread that runs the step, rows in the order of the step.
class StepObserver {
  public:
    virtual ~StepObserver() = default;
    virtual void on_rows(Site, std::uint32_t /*layer*/, const RowsView&) {}
    /// Softmax weights of one attention-residual mix, [n_rows, n_sources]: snapshots oldest
    /// first, then the prefix.
    virtual void on_mix(MixSite, std::uint32_t /*layer*/, const RowsView&) {}
    virtual void on_routing(std::uint32_t /*layer*/, const RoutingView&) {}
};

}  // namespace k3::trunk
