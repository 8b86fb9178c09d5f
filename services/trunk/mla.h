#pragma once
// Gated multi-head latent attention without positions, in its absorbed form. Spec section 3.7.
//
// The cache holds one latent and one shared key per position instead of expanded heads (27,648
// bytes instead of 1.4 MB per position in bf16 terms), and prefill uses the same form as decode,
// because the expanded one rounds differently. The cache keeps fp32 or bf16 values; a row attends
// to itself as it was rounded, so that its own step and later ones see the same. Causality comes
// from the position alone: a step first writes all its rows into the cache, then row by row attends
// to positions up to its own.

#include <cstddef>
#include <cstdint>

#include "common/base/result.h"
#include "common/kernels/kernel_table.h"
#include "common/model/config.h"
#include "services/trunk/batch.h"
#include "services/trunk/buffer.h"
#include "services/trunk/products.h"
#include "services/trunk/weights.h"

namespace k3::trunk {

class Mla {
  public:
    /// `n_threads`: the most that compute at the same time.
    static Result<Mla> create(const model::ModelConfig& config, std::size_t max_rows,
                              int n_threads);

    /// x, y [n_rows, hidden_size]; appends the rows to the sessions' caches of `layer`.
    /// Errors: those of the products.
    Status run(const Products& products, std::uint32_t layer, const MlaWeights& weights,
               const Batch& batch, const float* x, float* y);

  private:
    void append(const kernels::KernelTable& table, std::uint32_t layer, const MlaWeights& weights,
                const StepRow& row, float* projected) const noexcept;
    void attend(const kernels::KernelTable& table, std::uint32_t layer, const kernels::Matrix& kv_b,
                const StepRow& row, std::size_t row_index, std::size_t head) noexcept;

    model::MlaConfig config_;
    std::size_t hidden_size_ = 0;
    float scale_ = 0;  // (nope + rope)^-0.5
    int n_threads_ = 1;
    Buffer<float> q_low_;      // [max_rows, q_lora_rank]
    Buffer<float> q_;          // [max_rows, n_heads * (nope + rope)]
    Buffer<float> kv_;         // [max_rows, kv_lora_rank + rope]
    Buffer<float> gate_;       // [max_rows, n_heads * v]
    Buffer<float> out_;        // [max_rows, n_heads * v]
    Buffer<float> in_latent_;  // [n_threads, 2 * kv_lora_rank], a head's query and result
};

}  // namespace k3::trunk
