#include "tests/support/local_experts.h"

#include <algorithm>
#include <numeric>

#include "common/model/tensor_names.h"

namespace k3::test {

using kernels::Matrix;
using kernels::WeightType;

void LocalExperts::prefetch(const trunk::Routing&) noexcept { ++n_prefetches; }

Status LocalExperts::start(const trunk::Routing& routing, std::span<const float> latent) {
    routing_ = routing;
    latent_ = latent;
    return Status::ok();
}

Status LocalExperts::finish(std::span<std::int64_t> sums) {
    std::fill(sums.begin(), sums.end(), 0);
    if (fault) RETURN_IF_ERROR(fault(routing_.layer));
    take_scratch();
    std::iota(order_.begin(), order_.end(), std::size_t{0});
    std::sort(order_.begin(), order_.end(), [this](std::size_t a, std::size_t b) {
        return std::pair(routing_.ids[a], a) < std::pair(routing_.ids[b], b);
    });
    for (std::size_t first = 0; first < order_.size();) {
        const std::uint32_t expert = routing_.ids[order_[first]];
        std::size_t last = first;
        while (last < order_.size() && routing_.ids[order_[last]] == expert) ++last;
        RETURN_IF_ERROR(run_expert(expert, std::span(order_).subspan(first, last - first), sums));
        first = last;
    }
    return Status::ok();
}

/// For as many picks of one expert as there can be.
void LocalExperts::take_scratch() {
    const std::size_t n = routing_.n_rows;
    order_.resize(n * routing_.top_k);
    x_.resize(n * model_.config.moe.latent_size);
    y_.resize(x_.size());
    gate_.resize(n * model_.config.moe.moe_intermediate_size);
    up_.resize(gate_.size());
}

void LocalExperts::load_all() {
    for (std::uint32_t layer = model_.config.first_k_dense; layer < model_.config.n_layers; ++layer)
        for (std::uint32_t expert = 0; expert < model_.config.moe.n_experts; ++expert)
            load(layer, expert);
}

const LocalExperts::Expert& LocalExperts::load(std::uint32_t layer, std::uint32_t expert) {
    auto [at, is_new] = loaded_.try_emplace({layer, expert});
    if (!is_new) return at->second;
    const auto specs = model::expert_tensors(model_.config, layer, expert);
    for (std::size_t part = 0; part < specs.size(); ++part) {
        const storage::TensorInfo* tensor =
            model_.checkpoint->require(specs[part].name, specs[part].dtype, specs[part].shape)
                .value();
        at->second.parts[part].resize(tensor->bytes);
        Status read = model_.checkpoint->read(*tensor, at->second.parts[part]);
        K3_CHECK(read.has_value(), read.error().message);
    }
    return at->second;
}

/// w2 SiTU(w1 z, w3 z) for the rows that picked this expert, added in fixed point.
Status LocalExperts::run_expert(std::uint32_t expert, std::span<const std::size_t> picks,
                                std::span<std::int64_t> sums) {
    const model::MoeConfig& moe = model_.config.moe;
    const std::size_t latent = moe.latent_size;
    const std::size_t inner = moe.moe_intermediate_size;
    const Expert& loaded = load(routing_.layer, expert);
    auto matrix = [&](int part, std::size_t n_out, std::size_t n_in) {
        return Matrix{WeightType::mxfp4, loaded.parts[part].data(),
                      reinterpret_cast<const std::uint8_t*>(loaded.parts[part + 1].data()), n_out,
                      n_in};
    };
    const Matrix w1 = matrix(0, inner, latent);
    const Matrix w2 = matrix(2, latent, inner);
    const Matrix w3 = matrix(4, inner, latent);
    for (std::size_t i = 0; i < picks.size(); ++i)
        std::copy_n(latent_.data() + picks[i] / routing_.top_k * latent, latent,
                    x_.data() + i * latent);
    table_.matmul(w1, x_.data(), latent, picks.size(), gate_.data(), inner);
    table_.matmul(w3, x_.data(), latent, picks.size(), up_.data(), inner);
    table_.situ_glu(gate_.data(), up_.data(), picks.size() * inner, model_.config.situ_beta,
                    model_.config.situ_linear_beta, gate_.data());
    table_.matmul(w2, gate_.data(), inner, picks.size(), y_.data(), latent);
    for (std::size_t i = 0; i < picks.size(); ++i) {
        std::int64_t* row = sums.data() + picks[i] / routing_.top_k * latent;
        if (table_.accumulate_fixed(y_.data() + i * latent, latent, routing_.weights[picks[i]],
                                    row) != latent)
            return Error{ErrorCode::corrupt,
                         "layer " + std::to_string(routing_.layer) + " expert " +
                             std::to_string(expert) + " gave a value out of range",
                         ""};
    }
    return Status::ok();
}

}  // namespace k3::test
