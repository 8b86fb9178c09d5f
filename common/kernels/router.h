#pragma once
// The router's choice for one row. Spec section 3.9, steps 2 to 5.

#include <cstddef>
#include <cstdint>
#include <span>

namespace k3::kernels {

struct RouterParams {
    std::size_t top_k = 0;
    bool renormalize = true;
    float scaling_factor = 1.0F;
};

/// `scores` [n_experts]: sigmoid scores without the bias. Chooses the top_k largest of
/// score + bias (ties to the lowest index) and writes them in descending order to `ids` and
/// `weights` [top_k]: weights are the unbiased scores, divided by (their sum in rank order + 1e-20)
/// if renormalize, times scaling_factor. `scratch` holds n_experts values.
void route(const RouterParams& params, std::span<const float> scores, std::span<const float> bias,
           std::span<float> scratch, std::span<std::uint32_t> ids,
           std::span<float> weights) noexcept;

}  // namespace k3::kernels
