#include "services/trunk/kda.h"

#include <cmath>

#include "common/kernels/parallel.h"

namespace k3::trunk {

namespace {

constexpr float kL2Eps = 1e-6F;  // added to the sum of squares inside the root (spec D2)

}  // namespace

Result<Kda> Kda::create(const model::ModelConfig& config, std::size_t max_rows) {
    Kda kda;
    kda.config_ = config.kda;
    kda.hidden_size_ = config.hidden_size;
    kda.eps_ = config.rms_norm_eps;
    kda.q_scale_ = 1.0F / std::sqrt(static_cast<float>(config.kda.head_dim));
    const std::size_t width = max_rows * config.kda.width();
    for (Buffer<float>* buffer :
         {&kda.q_, &kda.k_, &kda.v_, &kda.decay_, &kda.gate_, &kda.alpha_, &kda.out_}) {
        ASSIGN_OR_RETURN(*buffer, Buffer<float>::create(width, "KDA rows"));
    }
    ASSIGN_OR_RETURN(kda.decay_down_,
                     Buffer<float>::create(max_rows * config.kda.head_dim, "KDA rows"));
    ASSIGN_OR_RETURN(kda.beta_, Buffer<float>::create(max_rows * config.kda.n_heads, "KDA rows"));
    return kda;
}

Status Kda::run(const Products& products, std::uint32_t layer, const KdaWeights& weights,
                const Batch& batch, const float* x, float* y) {
    const std::size_t n = batch.n_rows();
    const std::size_t width = config_.width();
    const std::size_t rank = config_.head_dim;
    auto project = [&](const Matrix& w, float* to) {
        return products.matmul(w, x, hidden_size_, n, to, w.n_out());
    };
    RETURN_IF_ERROR(project(weights.q, q_.data()));
    RETURN_IF_ERROR(project(weights.k, k_.data()));
    RETURN_IF_ERROR(project(weights.v, v_.data()));
    RETURN_IF_ERROR(project(weights.f_a, decay_down_.data()));
    RETURN_IF_ERROR(
        products.matmul(weights.f_b, decay_down_.data(), rank, n, decay_.data(), width));
    RETURN_IF_ERROR(project(weights.b, beta_.data()));
    RETURN_IF_ERROR(project(weights.g, gate_.data()));

    const std::size_t heads = config_.n_heads;
    // Per row and head: decay, read, write and output of the matrix, and some 50 values per
    // channel.
    const std::size_t work = n / batch.runs.size() * rank * (4 * rank + 50);
    kernels::parallel_for(batch.runs.size() * heads, work, [&](std::size_t i) {
        run_head(products.table(), layer, weights, batch.runs[i / heads], i % heads);
    });
    return products.matmul(weights.o, out_.data(), width, n, y, hidden_size_);
}

/// Spec sections 3.6.1 (convolution and SiLU), 3.6.2 (norms), 3.6.3 (beta), 3.6.4 (decay), 3.6.5
/// (recurrence), 3.6.6 (output norm, then gate) for one head of one session.
void Kda::run_head(const kernels::KernelTable& table, std::uint32_t layer,
                   const KdaWeights& weights, const SessionRun& run, std::size_t head) noexcept {
    const std::size_t dim = config_.head_dim;
    const std::size_t kernel = config_.conv_kernel;
    const std::size_t first = head * dim;
    const std::size_t tap = first * kernel;
    const KdaHeadState state = run.session->kda(layer, head);
    for (std::uint32_t row : run.rows) {
        const std::size_t at = row * std::size_t{config_.width()} + first;
        float* q = q_.data() + at;
        float* k = k_.data() + at;
        float* v = v_.data() + at;
        table.short_conv(weights.q_taps.data() + tap, state.q_history, q, dim, kernel, q);
        table.short_conv(weights.k_taps.data() + tap, state.k_history, k, dim, kernel, k);
        table.short_conv(weights.v_taps.data() + tap, state.v_history, v, dim, kernel, v);
        table.l2_norm(q, dim, kL2Eps, q_scale_, q);
        table.l2_norm(k, dim, kL2Eps, 1.0F, k);

        float* decay = decay_.data() + at;
        float* alpha = alpha_.data() + at;
        table.kda_decay(decay, weights.dt_bias.data() + first, dim, weights.exp_a_log[head],
                        config_.gate_lower_bound, alpha);
        float beta = 0;
        table.sigmoid(beta_.data() + std::size_t{row} * config_.n_heads + head, 1, &beta);
        float* out = out_.data() + at;
        table.kda_step(state.matrix, q, k, v, alpha, beta, dim, dim, decay /* scratch */, out);

        table.rms_norm(out, weights.o_norm.data(), dim, eps_, out);
        table.sigmoid_gate(out, gate_.data() + at, dim, out);
    }
}

}  // namespace k3::trunk
