// The exact routed sum: bounds, rounding, order.

#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

#include "common/kernels/kernel_table.h"
#include "tests/kernels/buffers.h"

namespace k3::kernels {

namespace {

template <typename Body>
void for_every_variant(Body body) {
    const KernelTables available = available_kernels();
    for (std::size_t i = 0; i < available.count; ++i) {
        INFO("variant " << available.tables[i]->isa);
        body(*available.tables[i]);
    }
}

std::int64_t added(const KernelTable& table, float y, float weight) {
    std::int64_t sum = 0;
    REQUIRE(table.accumulate_fixed(&y, 1, weight, &sum) == 1);
    return sum;
}

float to_float(const KernelTable& table, std::int64_t sum) {
    float y = 0;
    table.fixed_to_float(&sum, 1, &y);
    return y;
}

}  // namespace

TEST_CASE("a term is rounded to a multiple of 2^-40, ties to even") {
    for_every_variant([](const KernelTable& table) {
        CHECK(added(table, 1.0F, 1.0F) == std::int64_t{1} << 40);
        CHECK(added(table, 0x1p-40F, 1.0F) == 1);
        CHECK(added(table, 0x0.8p-40F, 1.0F) == 0);    // half: to even, down
        CHECK(added(table, 0x1.8p-40F, 1.0F) == 2);    // one and a half: to even, up
        CHECK(added(table, 0x2.8p-40F, 1.0F) == 2);    // two and a half: to even, down
        CHECK(added(table, -0x1.8p-40F, 1.0F) == -2);  // both signs alike
        CHECK(added(table, -0x2.8p-40F, 1.0F) == -2);
        CHECK(added(table, 0x0.800001p-40F, 1.0F) == 1);
        CHECK(added(table, 0x0.7fffffp-40F, 1.0F) == 0);
        CHECK(added(table, 1e-45F, 1.0F) == 0);
        CHECK(added(table, -0.0F, 1.0F) == 0);
        // Largest terms: 24 bits of mantissa far above 2^52, where a double has no fraction.
        CHECK(added(table, 0x1.fffffep17F, 1.0F) == std::int64_t{0xFFFFFF} << 34);
        CHECK(added(table, -0x1.fffffep17F, 1.0F) == -(std::int64_t{0xFFFFFF} << 34));
    });
}

TEST_CASE("the product is rounded to fp32 before it becomes fixed point") {
    for_every_variant([](const KernelTable& table) {
        // (1 + 2^-23)^2 = 1 + 2^-22 + 2^-46 rounds to 1 + 2^-22 in fp32.
        const float x = 1.0F + 0x1p-23F;
        CHECK(added(table, x, x) == (std::int64_t{1} << 40) + (std::int64_t{1} << 18));
    });
}

TEST_CASE("a term that is not finite or reaches 2^18 is reported with its place") {
    for_every_variant([](const KernelTable& table) {
        constexpr float kInf = std::numeric_limits<float>::infinity();
        constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
        for (float bad : {0x1p18F, -0x1p18F, 1e30F, kInf, -kInf, kNan}) {
            for (std::size_t place : {0, 1, 15, 16, 38}) {
                INFO("value " << bad << " at " << place);
                std::vector<float> y(39, 2.0F);
                y[place] = bad;
                std::vector<std::int64_t> sums(39, 7);
                CHECK(table.accumulate_fixed(y.data(), y.size(), 1.0F, sums.data()) == place);
                for (std::size_t i = place; i < sums.size(); ++i) CHECK(sums[i] == 7);
            }
        }
        // The bound holds for the term, not for y: a weight can bring it back or push it out.
        std::int64_t sum = 0;
        float y = 0x1p20F;
        CHECK(table.accumulate_fixed(&y, 1, 0.125F, &sum) == 1);
        y = 0x1p17F;
        CHECK(table.accumulate_fixed(&y, 1, 2.0F, &sum) == 0);
        y = 1.0F;
        CHECK(table.accumulate_fixed(&y, 1, kNan, &sum) == 0);
        y = 0.0F;
        CHECK(table.accumulate_fixed(&y, 1, kInf, &sum) == 0);  // 0 * inf is NaN
    });
}

TEST_CASE("sums become floats with one rounding") {
    for_every_variant([](const KernelTable& table) {
        CHECK(to_float(table, 0) == 0.0F);
        CHECK(to_float(table, 1) == 0x1p-40F);
        CHECK(to_float(table, -1) == -0x1p-40F);
        const std::int64_t one = std::int64_t{1} << 40;
        CHECK(to_float(table, one + (one >> 24)) == 1.0F);  // a tie: to even
        CHECK(to_float(table, one + 3 * (one >> 24)) == 1.0F + 0x1p-22F);
        CHECK(to_float(table, one + (one >> 24) + 1) == 1.0F + 0x1p-23F);
        // Rounding through double first would make this a tie and lose the last bit.
        const std::int64_t wide = (std::int64_t{1} << 61) + (std::int64_t{1} << 37) + 1;
        CHECK(to_float(table, wide) == 0x1p21F + 0x1p-2F);
        // Sixteen terms just below the bound.
        CHECK(to_float(table, 16 * (std::int64_t{0xFFFFFF} << 34)) == 0x1.fffffep21F);
        CHECK(to_float(table, -16 * (std::int64_t{0xFFFFFF} << 34)) == -0x1.fffffep21F);
    });
}

TEST_CASE("sixteen experts add up to the same bits in any order and any grouping") {
    for_every_variant([](const KernelTable& table) {
        constexpr std::size_t kExperts = 16;
        constexpr std::size_t kWidth = 101;
        test::Random random(3);
        std::vector<std::vector<float>> outputs;
        std::vector<float> weights;
        for (std::size_t e = 0; e < kExperts; ++e) {
            outputs.emplace_back();
            // Magnitudes from 2^-30 to 2^17: in fp32 nearly every order gives another sum.
            const float scale = std::ldexp(1.0F, static_cast<int>(random.below(47)) - 30);
            for (std::size_t i = 0; i < kWidth; ++i)
                outputs.back().push_back(random.value(test::Values::ordinary) * scale);
            weights.push_back(0.9F * std::abs(random.value(test::Values::ordinary)) / 2);
        }
        const auto sum_of = [&](const std::vector<std::size_t>& experts) {
            std::vector<std::int64_t> sums(kWidth);
            for (std::size_t e : experts)
                REQUIRE(table.accumulate_fixed(outputs[e].data(), kWidth, weights[e],
                                               sums.data()) == kWidth);
            return sums;
        };
        std::vector<std::size_t> order(kExperts);
        std::iota(order.begin(), order.end(), 0);
        const std::vector<std::int64_t> expected = sum_of(order);
        for (int trial = 0; trial < 20; ++trial) {
            for (std::size_t i = kExperts - 1; i > 0; --i)
                std::swap(order[i], order[random.below(i + 1)]);
            CHECK(sum_of(order) == expected);
            const auto cut = static_cast<std::ptrdiff_t>(random.below(kExperts));
            const std::vector<std::int64_t> left = sum_of({order.begin(), order.begin() + cut});
            std::vector<std::int64_t> both = sum_of({order.begin() + cut, order.end()});
            for (std::size_t i = 0; i < kWidth; ++i) both[i] += left[i];
            CHECK(both == expected);
        }
    });
}

}  // namespace k3::kernels
