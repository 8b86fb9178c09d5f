#include "common/kernels/math.h"

#include <doctest/doctest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <initializer_list>
#include <limits>

namespace k3::kernels {

namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr double kInf64 = std::numeric_limits<double>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

/// Distance of `actual` from `expected` in units of the last place of `expected` as a float.
double ulps(float actual, double expected) {
    const float rounded = static_cast<float>(expected);
    if (!std::isfinite(rounded)) return actual == rounded ? 0 : kInf64;
    const float size = std::abs(rounded);
    double ulp = static_cast<double>(std::nextafter(size, kInf)) - static_cast<double>(size);
    // Just below a power of two the spacing is half of the one above it.
    if (std::abs(expected) < static_cast<double>(size)) ulp = size - std::nextafter(size, 0.0F);
    return std::abs(static_cast<double>(actual) - expected) / ulp;
}

template <typename Function, typename Reference>
double worst_ulps(Function function, Reference reference, float from, float to) {
    constexpr int kPoints = 500'000;
    double worst = 0;
    for (int i = 0; i <= kPoints; ++i) {
        const float x = from + (to - from) * (static_cast<float>(i) / kPoints);
        worst = std::max(worst, ulps(function(x), reference(static_cast<double>(x))));
    }
    return worst;
}

double reference_sigmoid(double x) {
    return x < 0 ? std::exp(x) / (1 + std::exp(x)) : 1 / (1 + std::exp(-x));
}

}  // namespace

TEST_CASE("exp_f32 stays within 1 ulp, subnormal results included") {
    const auto reference = [](double x) { return std::exp(x); };
    CHECK(worst_ulps(exp_f32, reference, -104.5F, 89.0F) <= 1.0);
    CHECK(worst_ulps(exp_f32, reference, -1.5F, 1.5F) <= 1.0);
    CHECK(worst_ulps(exp_f32, reference, -103.98F, -87.0F) <= 1.0);
    CHECK(worst_ulps(exp_f32, reference, -6.0F, -5.0F) <= 1.0);  // holds the worst point of all
}

TEST_CASE("exp_f32 is exact at its ends") {
    CHECK(exp_f32(0.0F) == 1.0F);
    CHECK(exp_f32(-0.0F) == 1.0F);
    CHECK(exp_f32(88.72F) < kInf);
    CHECK(exp_f32(88.73F) == kInf);
    CHECK(exp_f32(3e38F) == kInf);
    CHECK(exp_f32(kInf) == kInf);
    CHECK(exp_f32(-103.97F) == std::numeric_limits<float>::denorm_min());
    CHECK(exp_f32(-103.98F) == 0.0F);
    CHECK(exp_f32(-3e38F) == 0.0F);
    CHECK(exp_f32(-kInf) == 0.0F);
    CHECK(std::isnan(exp_f32(kNan)));
    CHECK(std::isnan(exp_f32(-kNan)));
}

TEST_CASE("sigmoid_f32 stays within 2.5 ulp on both sides and saturates") {
    CHECK(worst_ulps(sigmoid_f32, reference_sigmoid, -104.5F, 104.5F) <= 2.5);
    CHECK(worst_ulps(sigmoid_f32, reference_sigmoid, -5.0F, 5.0F) <= 2.5);
    CHECK(worst_ulps(sigmoid_f32, reference_sigmoid, -103.9F, -87.0F) <= 2.5);
    CHECK(sigmoid_f32(0.0F) == 0.5F);
    CHECK(sigmoid_f32(kInf) == 1.0F);
    CHECK(sigmoid_f32(-kInf) == 0.0F);
    CHECK(sigmoid_f32(-100.0F) > 0.0F);  // 1 / (1 + e^100) would have been 0
    CHECK(std::isnan(sigmoid_f32(kNan)));
}

TEST_CASE("tanh_f32 stays within 1.5 ulp, is odd, and exact for tiny arguments") {
    const auto reference = [](double x) { return std::tanh(x); };
    CHECK(worst_ulps(tanh_f32, reference, -10.0F, 10.0F) <= 1.5);
    CHECK(worst_ulps(tanh_f32, reference, -0.6F, 0.6F) <= 1.5);
    CHECK(worst_ulps(tanh_f32, reference, -1e-3F, 1e-3F) <= 1.5);
    CHECK(worst_ulps(tanh_f32, reference, -1e-30F, 1e-30F) <= 1.5);
    for (float x : {1e-45F, 1e-38F, 1e-5F, 0.3F, 0.5499F, 0.5501F, 7.0F, 100.0F})
        CHECK(tanh_f32(-x) == -tanh_f32(x));
    CHECK(tanh_f32(1e-45F) == 1e-45F);
    CHECK(std::signbit(tanh_f32(-0.0F)));
    CHECK(tanh_f32(kInf) == 1.0F);
    CHECK(tanh_f32(-3e38F) == -1.0F);
    CHECK(std::isnan(tanh_f32(kNan)));
}

TEST_CASE("exp_f64 agrees with the standard library to 4e-16") {
    double worst = 0;
    for (int i = 0; i <= 500'000; ++i) {
        const double x = -708.0 + 1417.0 * i / 500'000;
        worst = std::max(worst, std::abs(exp_f64(x) / std::exp(x) - 1));
    }
    CHECK(worst <= 4e-16);
    CHECK(exp_f64(0.0) == 1.0);
    CHECK(exp_f64(710.0) == kInf64);
    CHECK(exp_f64(kInf64) == kInf64);
    CHECK(exp_f64(-745.0) == std::numeric_limits<double>::denorm_min());
    CHECK(exp_f64(-746.0) == 0.0);
    CHECK(exp_f64(-kInf64) == 0.0);
    CHECK(std::isnan(exp_f64(std::numeric_limits<double>::quiet_NaN())));
}

TEST_CASE("log_f64 agrees with the standard library, near 1 and for subnormals too") {
    const auto check = [](double x) {
        const double expected = std::log(x);
        const double error = std::abs(log_f64(x) - expected);
        CHECK(error <= 4e-16 * std::abs(expected));
    };
    double worst = 0;
    for (int i = 1; i <= 500'000; ++i) {
        const double x = std::bit_cast<double>(static_cast<std::uint64_t>(i) * 0x7FEFFFFFFFFFU / 4);
        const double near_one = 0.5 + 1.5 * i / 500'000;
        for (double value : {x, near_one}) {
            const double expected = std::log(value);
            const double error = std::abs(log_f64(value) - expected);
            if (error > 0) worst = std::max(worst, error / std::abs(expected));
        }
    }
    CHECK(worst <= 4e-16);
    for (double x : {1e-320, 5e-324, 1e-300, 0.5, 1 - 1e-16, 1 + 2.3e-16, 2.0, 1e300}) check(x);
    CHECK(log_f64(1.0) == 0.0);
    CHECK(log_f64(kInf64) == kInf64);
    CHECK(log_f64(0.0) == -kInf64);
    CHECK(std::isnan(log_f64(-1.0)));
    CHECK(std::isnan(log_f64(std::numeric_limits<double>::quiet_NaN())));
}

}  // namespace k3::kernels
