#include "services/sampler/random_stream.h"

namespace k3::sampler {

namespace {

constexpr std::uint32_t kMultiplier0 = 0xD2511F53U;
constexpr std::uint32_t kMultiplier1 = 0xCD9E8D57U;
constexpr std::uint32_t kWeyl0 = 0x9E3779B9U;  // golden ratio
constexpr std::uint32_t kWeyl1 = 0xBB67AE85U;  // square root of 3, minus 1
constexpr int kRounds = 10;

}  // namespace

std::array<std::uint32_t, 4> philox4x32(std::array<std::uint32_t, 4> counter,
                                        std::array<std::uint32_t, 2> key) noexcept {
    for (int round = 0; round < kRounds; ++round) {
        const std::uint64_t product0 = std::uint64_t{kMultiplier0} * counter[0];
        const std::uint64_t product1 = std::uint64_t{kMultiplier1} * counter[2];
        counter = {static_cast<std::uint32_t>(product1 >> 32U) ^ counter[1] ^ key[0],
                   static_cast<std::uint32_t>(product1),
                   static_cast<std::uint32_t>(product0 >> 32U) ^ counter[3] ^ key[1],
                   static_cast<std::uint32_t>(product0)};
        key[0] += kWeyl0;
        key[1] += kWeyl1;
    }
    return counter;
}

double uniform(std::uint64_t seed, std::uint64_t step_index) noexcept {
    const auto words =
        philox4x32({static_cast<std::uint32_t>(step_index),
                    static_cast<std::uint32_t>(step_index >> 32U), 0, 0},
                   {static_cast<std::uint32_t>(seed), static_cast<std::uint32_t>(seed >> 32U)});
    const std::uint64_t bits = (std::uint64_t{words[1]} << 32U | words[0]) >> 11U;
    return static_cast<double>(bits) * 0x1p-53;
}

}  // namespace k3::sampler
