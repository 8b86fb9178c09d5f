#include <doctest/doctest.h>

#include <cmath>
#include <limits>

#include "tests/kernels/golden_case.h"

namespace k3::test {

namespace {

using kernels::KernelTable;

constexpr std::size_t kGroup = 32;

/// All 16 codes, twice, under one scale, against the table; and which of them are corrupt.
void test_table(const GoldenCase& golden, const KernelTable&) {
    const std::vector<double> value = golden.f64("value");
    REQUIRE(value.size() == 256 * 16);
    std::uint8_t all_codes[kGroup / 2];
    for (std::size_t i = 0; i < kGroup / 2; ++i)
        all_codes[i] = static_cast<std::uint8_t>((2 * i % 16) | ((2 * i + 1) % 16) << 4U);
    for (std::size_t byte = 0; byte < 256; ++byte) {
        INFO("scale byte " << byte);
        const auto scale = static_cast<std::uint8_t>(byte);
        float decoded[kGroup];
        kernels::decode_mxfp4(all_codes, &scale, 1, decoded);
        for (std::size_t i = 0; i < kGroup; ++i) {
            const std::size_t code = i % 16;
            const double expected = value[byte * 16 + code];
            const bool fits = std::abs(expected) <= std::numeric_limits<float>::max();
            if (fits) {
                CHECK(static_cast<double>(decoded[i]) == expected);
                CHECK(std::signbit(decoded[i]) == (code >= 8));
            } else {
                CHECK_FALSE(std::isfinite(decoded[i]));
            }
            // A group with one such code among zeros, first and last place.
            for (std::size_t place : {std::size_t{0}, kGroup - 1}) {
                std::uint8_t packed[kGroup / 2] = {};
                packed[place / 2] = static_cast<std::uint8_t>(code << (place % 2 * 4));
                CHECK(kernels::find_corrupt_group(packed, &scale, 1) == (fits ? 1U : 0U));
            }
        }
    }
}

void test_product(const GoldenCase& golden, const KernelTable& table) {
    const std::vector<std::uint8_t> packed = golden.u8("packed");
    const std::vector<std::uint8_t> scales = golden.u8("scale");
    const std::vector<float> x = golden.f32("x");
    const auto n_out = golden.param<std::size_t>("rows");
    const auto n_in = golden.param<std::size_t>("cols");
    const std::size_t n_groups = n_out * n_in / kGroup;
    REQUIRE(scales.size() == n_groups);
    CHECK(kernels::find_corrupt_group(packed.data(), scales.data(), n_groups) == n_groups);

    if (golden.manifest.at("outputs").contains("decoded")) {
        std::vector<float> decoded(n_out * n_in);
        kernels::decode_mxfp4(packed.data(), scales.data(), n_groups, decoded.data());
        CHECK(relative_error(decoded, golden.f64("decoded")) == 0);
    }

    const kernels::Matrix w{kernels::WeightType::mxfp4, packed.data(), scales.data(), n_out, n_in};
    const std::size_t n_rows = x.size() / n_in;
    std::vector<float> y(n_rows * n_out);
    table.matmul(w, x.data(), n_in, n_rows, y.data(), n_out);
    check_close("y", y, golden.f64("y"));
}

void test_corrupt(const GoldenCase& golden, const KernelTable&) {
    REQUIRE(golden.manifest.at("must_fail").get<bool>());
    const std::vector<std::uint8_t> packed = golden.u8("packed");
    const std::vector<std::uint8_t> scales = golden.u8("scale");
    const std::size_t groups_per_row = golden.param<std::size_t>("cols") / kGroup;

    std::vector<std::size_t> expected;
    for (const auto& place : golden.manifest.at("corrupt_groups"))
        expected.push_back(place.at(0).get<std::size_t>() * groups_per_row +
                           place.at(1).get<std::size_t>());
    std::vector<std::size_t> found;
    for (std::size_t at = 0; at < scales.size(); ++at) {
        at += kernels::find_corrupt_group(packed.data() + at * kGroup / 2, scales.data() + at,
                                          scales.size() - at);
        if (at < scales.size()) found.push_back(at);
    }
    CHECK(found == expected);
}

}  // namespace

void add_mxfp4_tests(GoldenTests& tests) {
    tests["mxfp4_table"] = test_table;
    for (const char* name : {"mxfp4_small", "mxfp4_wide", "mxfp4_one_group"})
        tests[name] = test_product;
    tests["mxfp4_corrupt"] = test_corrupt;
}

}  // namespace k3::test
