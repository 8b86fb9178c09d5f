#include <cstddef>
#include <cstdint>

#include "common/kernels/kernel_table.h"

namespace k3::kernels {

namespace {
#include "common/kernels/math.inc"
#include "common/kernels/weights.inc"
}  // namespace

std::size_t find_corrupt_group(const std::uint8_t* packed, const std::uint8_t* scales,
                               std::size_t n_groups) noexcept {
    for (std::size_t g = 0; g < n_groups; ++g) {
        if (scales[g] < 253) continue;
        if (scales[g] == 255) return g;
        // Codes 4 and 6 have magnitudes 2 and 4: the smallest that overflow under 254 and 253.
        const unsigned overflows_from = scales[g] == 254 ? 4U : 6U;
        for (std::size_t i = 0; i < kGroup / 2; ++i) {
            const unsigned pair = packed[g * (kGroup / 2) + i];
            if ((pair & 7U) >= overflows_from || ((pair >> 4U) & 7U) >= overflows_from) return g;
        }
    }
    return n_groups;
}

void decode_mxfp4(const std::uint8_t* packed, const std::uint8_t* scales, std::size_t n_groups,
                  float* out) noexcept {
    const WeightRow row{packed, scales};
    for (std::size_t g = 0; g < n_groups; ++g)
        widen_group<WeightType::mxfp4>(row, g * kGroup, kGroup, out + g * kGroup);
}

}  // namespace k3::kernels
