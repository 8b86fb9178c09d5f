#pragma once
// Kimi Delta Attention: a gated delta rule with a short convolution in front. Spec section 3.6.
//
// Projections are products over all rows of the step. From there on everything belongs to one head
// of one session: convolution, normalisation, decay, recurrence, output norm and gate go token by
// token, so one thread takes a head through all its rows while the head's matrix stays in cache.
// The chunk form (spec 3.6.7) is not used: it rounds differently, and the text would depend on how
// a prompt is cut.

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

class Kda {
  public:
    static Result<Kda> create(const model::ModelConfig& config, std::size_t max_rows);

    /// x, y [n_rows, hidden_size]; reads and advances the sessions' state of `layer`.
    /// Errors: those of the products.
    Status run(const Products& products, std::uint32_t layer, const KdaWeights& weights,
               const Batch& batch, const float* x, float* y);

  private:
    void run_head(const kernels::KernelTable& table, std::uint32_t layer, const KdaWeights& weights,
                  const SessionRun& run, std::size_t head) noexcept;

    model::KdaConfig config_;
    std::size_t hidden_size_ = 0;
    float eps_ = 0;
    float q_scale_ = 0;           // head_dim^-0.5
    Buffer<float> q_, k_, v_;     // [max_rows, width]
    Buffer<float> decay_down_;    // [max_rows, head_dim]
    Buffer<float> decay_, gate_;  // [max_rows, width]
    Buffer<float> alpha_, out_;   // [max_rows, width]
    Buffer<float> beta_;          // [max_rows, n_heads]
};

}  // namespace k3::trunk
