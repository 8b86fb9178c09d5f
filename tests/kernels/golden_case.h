#pragma once
// One operator case of tests/golden/ops/manifest.json, and how its outputs are compared.

#include <cstdint>
#include <functional>
#include <map>
#include <nlohmann/json.hpp>
#include <span>
#include <string>
#include <vector>

#include "common/kernels/kernel_table.h"
#include "tests/support/golden.h"

namespace k3::test {

struct GoldenCase {
    std::string name;
    nlohmann::json manifest;  // what, params, inputs, outputs

    Array array(const std::string& file) const;  // an input or an output, e.g. "x"
    std::vector<float> f32(const std::string& file) const { return array(file).as_f32(); }
    std::vector<double> f64(const std::string& file) const { return array(file).as_f64(); }
    std::vector<std::uint8_t> u8(const std::string& file) const { return array(file).bytes; }

    template <typename T>
    T param(const std::string& key) const {
        return manifest.at("params").at(key).get<T>();
    }
};

/// Accepted relative_error: 1e-5, and 2e-5 where tests/golden/README.md says so.
inline constexpr double kTolerance = 1e-5;
inline constexpr double kLooseTolerance = 2e-5;

/// Fails the running case unless relative_error(actual, expected) <= tolerance.
void check_close(const std::string& what, std::span<const float> actual,
                 std::span<const double> expected, double tolerance = kTolerance);

/// Row-major fp32 weights as a matrix; borrows.
kernels::Matrix f32_matrix(std::span<const float> weights, std::size_t n_out, std::size_t n_in);

/// The same weights as bf16; fails the running case if one of them is not exact in bf16.
std::vector<std::uint16_t> as_bf16(std::span<const float> weights);

using GoldenTest = std::function<void(const GoldenCase&, const kernels::KernelTable&)>;

/// The tests by case name; every file adds its own.
using GoldenTests = std::map<std::string, GoldenTest>;
void add_mxfp4_tests(GoldenTests& tests);
void add_vector_tests(GoldenTests& tests);
void add_attention_tests(GoldenTests& tests);
void add_moe_tests(GoldenTests& tests);

}  // namespace k3::test
