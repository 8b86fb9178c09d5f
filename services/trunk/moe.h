#pragma once
// The feed-forward part of a layer: dense, or the latent mixture of experts. Spec
// sections 3.8, 3.9.
//
// Routed experts live elsewhere: this part routes, projects into the latent space, hands rows and
// picks to the backend, computes the shared experts while it waits, and brings the sums back. The
// sums come in 64-bit fixed point and are rounded to fp32 once, so they do not depend on who
// computed which part.

#include <cstddef>
#include <cstdint>

#include "common/base/result.h"
#include "common/kernels/kernel_table.h"
#include "common/model/config.h"
#include "services/trunk/buffer.h"
#include "services/trunk/expert_backend.h"
#include "services/trunk/layer_range.h"
#include "services/trunk/observer.h"
#include "services/trunk/products.h"
#include "services/trunk/weights.h"

namespace k3::trunk {

class FeedForward {
  public:
    static Result<FeedForward> create(const model::ModelConfig& config, LayerRange range,
                                      std::size_t max_rows);

    /// x, y [n_rows, hidden_size]. Errors: those of the products.
    Status dense(const Products& products, const MlpWeights& weights, const float* x,
                 std::size_t n_rows, float* y);

    /// Adds the time spent waiting for experts to `wait_ns`. Errors: the backend's, and those of
    /// the products.
    Status moe(const Products& products, std::uint32_t layer, const MoeWeights& weights,
               const float* x, std::size_t n_rows, ExpertBackend& experts, StepObserver* observer,
               std::uint64_t& wait_ns, float* y);

  private:
    Status gated_mlp(const Products& products, const MlpWeights& weights, const float* x,
                     std::size_t n_rows, float* y);
    Status route(const Products& products, const MoeWeights& weights, const float* x,
                 std::size_t n_rows);
    Status combine(const Products& products, const MoeWeights& weights, std::size_t n_rows,
                   float* y);

    model::MoeConfig config_;
    std::size_t hidden_size_ = 0;
    float eps_ = 0;
    float situ_beta_ = 0;
    float situ_linear_beta_ = 0;
    Buffer<float> gate_, up_;        // [max_rows, widest MLP]
    Buffer<float> scores_, biased_;  // [max_rows, n_experts]
    Buffer<std::uint32_t> ids_;      // [max_rows, top_k]
    Buffer<float> weights_;          // [max_rows, top_k]
    Buffer<float> latent_, routed_;  // [max_rows, latent_size]
    Buffer<std::int64_t> sums_;      // [max_rows, latent_size]
    Buffer<float> shared_;           // [max_rows, hidden_size]
};

}  // namespace k3::trunk
