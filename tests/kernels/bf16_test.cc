// bf16 values of a latent cache: how they are rounded, and that attention reads them exactly.

#include <doctest/doctest.h>

#include <bit>
#include <cmath>
#include <cstdint>
#include <vector>

#include "tests/kernels/buffers.h"

namespace k3::test {

namespace {

float widened_bf16(std::uint32_t stored) { return std::bit_cast<float>(stored << 16U); }

std::uint16_t rounded(const kernels::KernelTable& table, float x) {
    std::uint16_t y = 0;
    table.round_to_bf16(&x, 1, &y);
    return y;
}

}  // namespace

TEST_CASE("every bf16 value stays, and what lies between two goes to the nearer or the even one") {
    const kernels::KernelTable& scalar = *kernels::available_kernels().tables[0];
    bool all = true;
    for (std::uint32_t sign : {0U, 0x8000U}) {
        for (std::uint32_t value = 0; value < 0x7F80U; ++value) {
            const std::uint32_t stored = sign | value;
            const std::uint32_t bits = stored << 16U;
            const auto round = [&](std::uint32_t low) {
                return rounded(scalar, std::bit_cast<float>(bits | low));
            };
            const std::uint32_t even = stored + (stored & 1U);
            all = all && round(0) == stored && round(1) == stored && round(0x7FFF) == stored &&
                  round(0x8000) == even && round(0x8001) == stored + 1 &&
                  round(0xFFFF) == stored + 1;
        }
    }
    CHECK(all);
    CHECK(rounded(scalar, 3.4028235e38F) == 0x7F80);  // beyond the largest: infinity
    CHECK(rounded(scalar, -INFINITY) == 0xFF80);
}

TEST_CASE("a NaN stays one, whichever of its bits are set") {
    const kernels::KernelTables available = kernels::available_kernels();
    for (std::size_t i = 0; i < available.count; ++i)
        for (const std::uint32_t bits : {0x7FC00000U, 0x7F800001U, 0x7FFFFFFFU, 0xFFFFFFFFU})
            CHECK(std::isnan(
                widened_bf16(rounded(*available.tables[i], std::bit_cast<float>(bits)))));
}

TEST_CASE("attention over bf16 values has the bits of attention over the same values in fp32") {
    constexpr std::size_t kPositions = 131;
    constexpr std::size_t kLatent = 515;
    constexpr std::size_t kRope = 67;
    Random random(11);
    const auto halves = [&](std::size_t n) {
        std::vector<std::uint16_t> values(n);
        for (std::uint16_t& value : values)
            value = static_cast<std::uint16_t>(
                std::bit_cast<std::uint32_t>(random.value(Values::ordinary)) >> 16U);
        return values;
    };
    const auto widened_all = [](const std::vector<std::uint16_t>& stored) {
        std::vector<float> values;
        for (const std::uint16_t value : stored) values.push_back(widened_bf16(value));
        return values;
    };
    const std::vector<std::uint16_t> latent = halves(kPositions * kLatent);
    const std::vector<std::uint16_t> rope = halves(kPositions * kRope);
    const std::vector<float> wide_latent = widened_all(latent);
    const std::vector<float> wide_rope = widened_all(rope);
    const Buffer<float> q_latent = random_floats(kLatent, 1, Values::ordinary, random);
    const Buffer<float> q_rope = random_floats(kRope, 1, Values::ordinary, random);
    const kernels::KernelTables available = kernels::available_kernels();
    for (std::size_t i = 0; i < available.count; ++i) {
        const kernels::KernelTable& table = *available.tables[i];
        INFO(table.isa);
        std::vector<float> scores(kPositions);
        std::vector<float> expected(kLatent);
        std::vector<float> out(kLatent);
        table.mla_attend(q_latent.data(), q_rope.data(), wide_latent.data(), kLatent,
                         wide_rope.data(), kRope, kPositions, kLatent, kRope, 0.05F, scores.data(),
                         expected.data());
        table.mla_attend_bf16(q_latent.data(), q_rope.data(), latent.data(), kLatent, rope.data(),
                              kRope, kPositions, kLatent, kRope, 0.05F, scores.data(), out.data());
        std::vector<std::uint32_t> bits;
        std::vector<std::uint32_t> expected_bits;
        append_bits(out, bits);
        append_bits(expected, expected_bits);
        CHECK(bits == expected_bits);
    }
}

}  // namespace k3::test
