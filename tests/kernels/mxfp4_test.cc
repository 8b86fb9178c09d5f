// MXFP4 decoding inside the products, and the search for corrupt groups.

#include <doctest/doctest.h>

#include <bit>
#include <cmath>
#include <vector>

#include "common/kernels/kernel_table.h"

namespace k3::kernels {

namespace {

constexpr std::size_t kGroup = 32;

}  // namespace

TEST_CASE("every variant decodes each of the 256 scales and 16 codes exactly, in every place") {
    const KernelTables available = available_kernels();
    for (unsigned byte = 0; byte < 256; ++byte) {
        // One row per code. A product with 1 in one place and 0 elsewhere returns that weight.
        std::vector<std::uint8_t> packed;
        for (unsigned code = 0; code < 16; ++code)
            packed.insert(packed.end(), kGroup / 2, static_cast<std::uint8_t>(code * 17));
        const std::vector<std::uint8_t> scales(16, static_cast<std::uint8_t>(byte));
        const Matrix w{WeightType::mxfp4, packed.data(), scales.data(), 16, kGroup};
        std::vector<float> decoded(16 * kGroup);
        decode_mxfp4(packed.data(), scales.data(), 16, decoded.data());
        std::vector<float> unit(kGroup * kGroup);
        for (std::size_t place = 0; place < kGroup; ++place) unit[place * kGroup + place] = 1.0F;
        for (std::size_t i = 0; i < available.count; ++i) {
            INFO(available.tables[i]->isa << ", scale byte " << byte);
            std::vector<float> y(kGroup * 16);
            available.tables[i]->matmul(w, unit.data(), kGroup, kGroup, y.data(), 16);
            std::vector<float> y_alone(kGroup * 16);
            for (std::size_t place = 0; place < kGroup; ++place)
                available.tables[i]->matmul(w, &unit[place * kGroup], kGroup, 1,
                                            &y_alone[place * 16], 16);
            bool exact = true;
            for (std::size_t place = 0; place < kGroup; ++place) {
                for (std::size_t code = 0; code < 16; ++code) {
                    const float weight = decoded[code * kGroup + place];
                    for (float value : {y[place * 16 + code], y_alone[place * 16 + code]}) {
                        // Infinities meet zeros of the unit row: NaN, never a number.
                        exact =
                            exact && (std::isfinite(weight) ? value == weight : std::isnan(value));
                    }
                }
            }
            CHECK(exact);
        }
    }
}

TEST_CASE("subnormal weights count in full") {
    const std::vector<std::uint8_t> packed(kGroup / 2, 0x11);  // 0.5 everywhere
    const std::uint8_t scale = 0;                              // * 2^-127 = 2^-128 each
    const Matrix w{WeightType::mxfp4, packed.data(), &scale, 1, kGroup};
    const std::vector<float> x(kGroup, 0x1p100F);
    const KernelTables available = available_kernels();
    for (std::size_t i = 0; i < available.count; ++i) {
        float y = 0;
        available.tables[i]->matmul(w, x.data(), kGroup, 1, &y, 1);
        CHECK(y == 0x1p-23F);  // 32 * 2^-128 * 2^100; zero if subnormals were flushed
    }
}

TEST_CASE("the first corrupt group is found wherever it lies") {
    constexpr std::size_t kGroups = 9;
    for (std::size_t bad = 0; bad < kGroups; ++bad) {
        std::vector<std::uint8_t> packed(kGroups * kGroup / 2, 0x7F);  // 6 and -6
        std::vector<std::uint8_t> scales(kGroups, 252);                // still fits fp32
        CHECK(find_corrupt_group(packed.data(), scales.data(), kGroups) == kGroups);
        scales[bad] = 255;
        CHECK(find_corrupt_group(packed.data(), scales.data(), kGroups) == bad);
        scales[bad] = 253;  // 6 * 2^126 does not fit
        CHECK(find_corrupt_group(packed.data(), scales.data(), kGroups) == bad);
        for (std::size_t i = 0; i < kGroup / 2; ++i) packed[bad * kGroup / 2 + i] = 0x5D;  // 3, -3
        CHECK(find_corrupt_group(packed.data(), scales.data(), kGroups) == kGroups);
        scales[bad] = 254;  // 3 * 2^127 does not fit
        CHECK(find_corrupt_group(packed.data(), scales.data(), kGroups) == bad);
        for (std::size_t i = 0; i < kGroup / 2; ++i) packed[bad * kGroup / 2 + i] = 0xB3;  // 1.5
        CHECK(find_corrupt_group(packed.data(), scales.data(), kGroups) == kGroups);
    }
    CHECK(find_corrupt_group(nullptr, nullptr, 0) == 0);
}

}  // namespace k3::kernels
