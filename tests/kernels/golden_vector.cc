#include <doctest/doctest.h>

#include "tests/kernels/golden_case.h"

namespace k3::test {

namespace {

using kernels::KernelTable;

void check_rms_norm(const GoldenCase& golden, const KernelTable& table, float eps,
                    const std::string& output) {
    const std::vector<float> x = golden.f32("x");
    const std::vector<float> weight = golden.f32("weight");
    const std::vector<double> expected = golden.f64(output);
    const std::size_t n = weight.size();
    for (std::size_t row = 0; row < x.size() / n; ++row) {
        std::vector<float> y(n);
        table.rms_norm(x.data() + row * n, weight.data(), n, eps, y.data());
        check_close(output + " row " + std::to_string(row), y,
                    std::span(expected).subspan(row * n, n));
    }
}

void test_rms_norm(const GoldenCase& golden, const KernelTable& table) {
    check_rms_norm(golden, table, 1e-5F, "y_eps_1e-5");
    check_rms_norm(golden, table, 1e-6F, "y_eps_1e-6");
}

void test_rms_norm_wide(const GoldenCase& golden, const KernelTable& table) {
    check_rms_norm(golden, table, golden.param<float>("eps"), "y");
}

void test_l2_norm(const GoldenCase& golden, const KernelTable& table) {
    const Array x = golden.array("x");
    const std::size_t n = x.shape.at(1);
    std::vector<float> y = x.as_f32();  // in place
    const std::vector<double> expected = golden.f64("y");
    for (std::size_t row = 0; row < x.shape.at(0); ++row) {
        float* values = y.data() + row * n;
        table.l2_norm(values, n, golden.param<float>("eps"), 1.0F, values);
        check_close("row " + std::to_string(row), std::span(y).subspan(row * n, n),
                    std::span(expected).subspan(row * n, n));
    }
}

void test_situ(const GoldenCase& golden, const KernelTable& table) {
    const std::vector<float> gate = golden.f32("gate");
    std::vector<float> y(gate.size());
    table.situ_glu(gate.data(), golden.f32("up").data(), gate.size(), golden.param<float>("beta"),
                   golden.param<float>("linear_beta"), y.data());
    check_close("y", y, golden.f64("y"));
}

/// The golden history is [channels, kernel - 1], the kernel's [kernel - 1, channels].
std::vector<float> transpose(std::span<const float> x, std::size_t rows, std::size_t columns) {
    std::vector<float> out(x.size());
    for (std::size_t r = 0; r < rows; ++r)
        for (std::size_t c = 0; c < columns; ++c) out[c * rows + r] = x[r * columns + c];
    return out;
}

void check_short_conv(const GoldenCase& golden, const KernelTable& table,
                      std::vector<float> history, const std::vector<std::size_t>& pieces) {
    const auto channels = golden.param<std::size_t>("channels");
    const auto kernel = golden.param<std::size_t>("kernel");
    const std::vector<float> taps = golden.f32("weight");
    const std::vector<double> states = golden.f64("state_after");
    const std::size_t state_size = channels * (kernel - 1);
    std::vector<float> y = golden.f32("x");  // in place
    std::size_t token = 0;
    for (std::size_t piece = 0; piece < pieces.size(); ++piece) {
        for (std::size_t i = 0; i < pieces[piece]; ++i, ++token) {
            float* row = y.data() + token * channels;
            table.short_conv(taps.data(), history.data(), row, channels, kernel, row);
        }
        check_close("history after piece " + std::to_string(piece),
                    transpose(history, kernel - 1, channels),
                    std::span(states).subspan(piece * state_size, state_size));
    }
    REQUIRE(token * channels == y.size());
    check_close("y", y, golden.f64("y"));
}

void test_short_conv(const GoldenCase& golden, const KernelTable& table) {
    const std::size_t state_size =
        golden.param<std::size_t>("channels") * (golden.param<std::size_t>("kernel") - 1);
    check_short_conv(golden, table, std::vector<float>(state_size),
                     golden.param<std::vector<std::size_t>>("pieces"));
}

void test_short_conv_history(const GoldenCase& golden, const KernelTable& table) {
    const auto channels = golden.param<std::size_t>("channels");
    const auto kernel = golden.param<std::size_t>("kernel");
    check_short_conv(golden, table, transpose(golden.f32("state"), channels, kernel - 1), {3});
}

}  // namespace

void add_vector_tests(GoldenTests& tests) {
    tests["rmsnorm"] = test_rms_norm;
    tests["rmsnorm_wide"] = test_rms_norm_wide;
    tests["l2norm"] = test_l2_norm;
    tests["situ"] = test_situ;
    tests["short_conv"] = test_short_conv;
    tests["short_conv_history"] = test_short_conv_history;
}

}  // namespace k3::test
