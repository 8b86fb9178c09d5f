#include "services/trunk/moe.h"

#include <algorithm>
#include <chrono>

#include "common/base/deadline.h"
#include "common/kernels/parallel.h"
#include "common/kernels/router.h"

namespace k3::trunk {

Result<FeedForward> FeedForward::create(const model::ModelConfig& config, LayerRange range,
                                        std::size_t max_rows) {
    FeedForward ffn;
    ffn.config_ = config.moe;
    ffn.hidden_size_ = config.hidden_size;
    ffn.eps_ = config.rms_norm_eps;
    ffn.situ_beta_ = config.situ_beta;
    ffn.situ_linear_beta_ = config.situ_linear_beta;
    std::size_t width = 0;
    for (std::uint32_t layer = range.first; layer < range.end(); ++layer)
        width = std::max<std::size_t>(
            width, config.is_moe(layer) ? config.moe.shared_width() : config.intermediate_size);
    auto rows = [&](std::size_t n) { return Buffer<float>::create(max_rows * n, "FFN rows"); };
    ASSIGN_OR_RETURN(ffn.gate_, rows(width));
    ASSIGN_OR_RETURN(ffn.up_, rows(width));
    ASSIGN_OR_RETURN(ffn.scores_, rows(config.moe.n_experts));
    ASSIGN_OR_RETURN(ffn.biased_, rows(config.moe.n_experts));
    ASSIGN_OR_RETURN(ffn.weights_, rows(config.moe.top_k));
    ASSIGN_OR_RETURN(ffn.latent_, rows(config.moe.latent_size));
    ASSIGN_OR_RETURN(ffn.routed_, rows(config.moe.latent_size));
    ASSIGN_OR_RETURN(ffn.shared_, rows(config.hidden_size));
    ASSIGN_OR_RETURN(ffn.ids_,
                     Buffer<std::uint32_t>::create(max_rows * config.moe.top_k, "FFN rows"));
    ASSIGN_OR_RETURN(ffn.sums_,
                     Buffer<std::int64_t>::create(max_rows * config.moe.latent_size, "FFN rows"));
    return ffn;
}

Status FeedForward::dense(const Products& products, const MlpWeights& weights, const float* x,
                          std::size_t n_rows, float* y) {
    return gated_mlp(products, weights, x, n_rows, y);
}

/// down(SiTU(gate x, up x)). Spec section 3.8.
Status FeedForward::gated_mlp(const Products& products, const MlpWeights& weights, const float* x,
                              std::size_t n_rows, float* y) {
    const kernels::KernelTable& table = products.table();
    const std::size_t width = weights.gate.n_out();
    RETURN_IF_ERROR(products.matmul(weights.gate, x, hidden_size_, n_rows, gate_.data(), width));
    RETURN_IF_ERROR(products.matmul(weights.up, x, hidden_size_, n_rows, up_.data(), width));
    kernels::parallel_for(n_rows, 50 * width, [&](std::size_t r) {
        float* gate = gate_.data() + r * width;
        table.situ_glu(gate, up_.data() + r * width, width, situ_beta_, situ_linear_beta_, gate);
    });
    return products.matmul(weights.down, gate_.data(), width, n_rows, y, hidden_size_);
}

/// Spec section 3.9, steps 1 to 5.
Status FeedForward::route(const Products& products, const MoeWeights& weights, const float* x,
                          std::size_t n_rows) {
    const kernels::KernelTable& table = products.table();
    const std::size_t n = config_.n_experts;
    const std::size_t k = config_.top_k;
    const kernels::RouterParams params{k, config_.renormalize, config_.scaling_factor};
    RETURN_IF_ERROR(products.matmul(weights.router, x, hidden_size_, n_rows, scores_.data(), n));
    kernels::parallel_for(n_rows, n * (20 + k), [&](std::size_t r) {
        std::span<float> scores = scores_.span().subspan(r * n, n);
        table.sigmoid(scores.data(), n, scores.data());
        kernels::route(params, scores, weights.router_bias, biased_.span().subspan(r * n, n),
                       ids_.span().subspan(r * k, k), weights_.span().subspan(r * k, k));
    });
    return Status::ok();
}

/// Spec section 3.9, steps 8 to 10: norm of the aggregate, back to the hidden width, shared added.
Status FeedForward::combine(const Products& products, const MoeWeights& weights, std::size_t n_rows,
                            float* y) {
    const kernels::KernelTable& table = products.table();
    const std::size_t latent = config_.latent_size;
    kernels::parallel_for(n_rows, 4 * latent, [&](std::size_t r) {
        float* row = routed_.data() + r * latent;
        table.fixed_to_float(sums_.data() + r * latent, latent, row);
        if (!weights.latent_norm.empty())
            table.rms_norm(row, weights.latent_norm.data(), latent, eps_, row);
    });
    RETURN_IF_ERROR(
        products.matmul(weights.latent_up, routed_.data(), latent, n_rows, y, hidden_size_));
    kernels::parallel_for(n_rows, hidden_size_, [&](std::size_t r) {
        table.add(shared_.data() + r * hidden_size_, hidden_size_, y + r * hidden_size_);
    });
    return Status::ok();
}

Status FeedForward::moe(const Products& products, std::uint32_t layer, const MoeWeights& weights,
                        const float* x, std::size_t n_rows, ExpertBackend& experts,
                        StepObserver* observer, std::uint64_t& wait_ns, float* y) {
    const std::size_t latent = config_.latent_size;
    RETURN_IF_ERROR(route(products, weights, x, n_rows));
    if (observer != nullptr)
        observer->on_routing(layer, {n_rows, config_.top_k, config_.n_experts, ids_.data(),
                                     weights_.data(), scores_.data()});
    const Routing routing{layer, n_rows, config_.top_k, ids_.data(), weights_.data()};
    experts.prefetch(routing);
    RETURN_IF_ERROR(
        products.matmul(weights.latent_down, x, hidden_size_, n_rows, latent_.data(), latent));
    RETURN_IF_ERROR(experts.start(routing, latent_.span().first(n_rows * latent)));
    Status shared = gated_mlp(products, weights.shared, x, n_rows, shared_.data());

    // In any case: until then the experts use our buffers.
    const Clock::time_point before = Clock::now();
    Status finished = experts.finish(sums_.span().first(n_rows * latent));
    wait_ns += static_cast<std::uint64_t>(
        std::chrono::duration_cast<std::chrono::nanoseconds>(Clock::now() - before).count());
    RETURN_IF_ERROR(std::move(shared));
    RETURN_IF_ERROR(std::move(finished));
    return combine(products, weights, n_rows, y);
}

}  // namespace k3::trunk
