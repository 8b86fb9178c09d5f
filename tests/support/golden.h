#pragma once
// Golden data: where it lies, and its .npy arrays.

#include <cstdint>
#include <filesystem>
#include <span>
#include <string>
#include <vector>

namespace k3::test {

/// tests/golden, e.g. golden_dir() / "tiny-k3". From the environment variable K3_GOLDEN.
std::filesystem::path golden_dir();
/// configs/models/demo-k3 of the source tree.
std::filesystem::path demo_model_dir();

struct Array {
    std::string dtype;  // as numpy spells it: "<f4", "<f8", "|u1", "<i4", "<i8"
    std::vector<std::size_t> shape;
    std::vector<std::uint8_t> bytes;

    std::size_t size() const;            // number of elements
    std::vector<double> as_f64() const;  // any dtype, widened
    std::vector<float> as_f32() const;   // any dtype, converted
    std::vector<std::int64_t> as_i64() const;
};

/// Reads golden_dir() / `name`. A missing or damaged file fails the test run at once.
Array load_npy(const std::string& name);

/// max|actual - expected| / max|expected|, the measure of the golden manifest. NaN in both places
/// counts as equal, NaN in one as infinite.
double relative_error(std::span<const float> actual, std::span<const double> expected);

}  // namespace k3::test
