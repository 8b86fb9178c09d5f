#include "common/kernels/router.h"

#include <cmath>
#include <limits>
#include <string>

#include "common/base/check.h"

namespace k3::kernels {

namespace {

constexpr float kTaken = std::numeric_limits<float>::quiet_NaN();

/// The largest key that is not taken, the lowest index among equals.
std::size_t best_of(std::span<const float> keys) noexcept {
    std::size_t best = keys.size();
    for (std::size_t i = 0; i < keys.size(); ++i) {
        if (std::isnan(keys[i])) continue;
        if (best == keys.size() || keys[i] > keys[best]) best = i;
    }
    return best;
}

}  // namespace

void route(const RouterParams& params, std::span<const float> scores, std::span<const float> bias,
           std::span<float> scratch, std::span<std::uint32_t> ids,
           std::span<float> weights) noexcept {
    K3_CHECK(params.top_k > 0 && params.top_k <= scores.size() && bias.size() == scores.size() &&
                 scratch.size() >= scores.size() && ids.size() >= params.top_k &&
                 weights.size() >= params.top_k,
             "route: " + std::to_string(scores.size()) + " experts, " +
                 std::to_string(bias.size()) + " biases, top_k " + std::to_string(params.top_k));
    const std::span<float> keys = scratch.first(scores.size());
    for (std::size_t i = 0; i < keys.size(); ++i) {
        keys[i] = scores[i] + bias[i];
        // A NaN is chosen first: its weight then fails the row instead of vanishing unseen.
        if (std::isnan(keys[i])) keys[i] = std::numeric_limits<float>::infinity();
    }
    float sum = 0.0F;
    for (std::size_t rank = 0; rank < params.top_k; ++rank) {
        const std::size_t expert = best_of(keys);
        keys[expert] = kTaken;
        ids[rank] = static_cast<std::uint32_t>(expert);
        weights[rank] = scores[expert];
        sum += scores[expert];
    }
    const float divisor = params.renormalize ? sum + 1e-20F : 1.0F;
    for (std::size_t rank = 0; rank < params.top_k; ++rank)
        weights[rank] = weights[rank] / divisor * params.scaling_factor;
}

}  // namespace k3::kernels
