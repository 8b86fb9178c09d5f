#include "tests/support/golden.h"

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <iterator>
#include <limits>

namespace k3::test {

namespace {

[[noreturn]] void die(const std::string& message) {
    std::fprintf(stderr, "golden data: %s\n", message.c_str());
    std::exit(99);
}

std::filesystem::path from_environment(const char* name) {
    const char* value = std::getenv(name);
    if (value == nullptr) die(std::string(name) + " is not set: run the tests through ./dev test");
    return value;
}

/// The text between `key` and `end` in a .npy header, a Python dict literal.
std::string field(const std::string& header, const std::string& key, char begin, char end) {
    std::size_t at = header.find(key);
    std::size_t from = at == std::string::npos ? at : header.find(begin, at + key.size());
    std::size_t to = from == std::string::npos ? from : header.find(end, from + 1);
    if (to == std::string::npos) die("no " + key + " in header " + header);
    return header.substr(from + 1, to - from - 1);
}

template <typename To, typename From>
void convert(const Array& array, std::vector<To>& out) {
    for (std::size_t i = 0; i < out.size(); ++i) {
        From value;
        std::memcpy(&value, array.bytes.data() + i * sizeof(From), sizeof(From));
        out[i] = static_cast<To>(value);
    }
}

template <typename To>
std::vector<To> convert_all(const Array& array) {
    std::vector<To> out(array.size());
    if (array.dtype == "<f4")
        convert<To, float>(array, out);
    else if (array.dtype == "<f8")
        convert<To, double>(array, out);
    else if (array.dtype == "|u1")
        convert<To, std::uint8_t>(array, out);
    else if (array.dtype == "<i4")
        convert<To, std::int32_t>(array, out);
    else if (array.dtype == "<i8")
        convert<To, std::int64_t>(array, out);
    else if (array.dtype == "<u4")
        convert<To, std::uint32_t>(array, out);
    else
        die("dtype " + array.dtype + " is not supported");
    return out;
}

}  // namespace

std::filesystem::path golden_dir() { return from_environment("K3_GOLDEN"); }

std::filesystem::path demo_model_dir() {
    return from_environment("K3_SOURCE_ROOT") / "configs" / "models" / "demo-k3";
}

std::size_t Array::size() const {
    std::size_t n = 1;
    for (std::size_t d : shape) n *= d;
    return n;
}
std::vector<double> Array::as_f64() const { return convert_all<double>(*this); }
std::vector<float> Array::as_f32() const { return convert_all<float>(*this); }
std::vector<std::int64_t> Array::as_i64() const { return convert_all<std::int64_t>(*this); }

Array load_npy(const std::string& name) {
    std::ifstream file(golden_dir() / name, std::ios::binary);
    if (!file) die("cannot read " + (golden_dir() / name).string());
    std::string bytes(std::istreambuf_iterator<char>(file), {});
    if (bytes.size() < 10 || bytes.compare(0, 6, "\x93NUMPY") != 0 || bytes[6] != 1)
        die(name + " is not a .npy file of version 1");
    std::size_t header_bytes =
        static_cast<std::uint8_t>(bytes[8]) + 256U * static_cast<std::uint8_t>(bytes[9]);
    std::string header = bytes.substr(10, header_bytes);
    if (header.find("'fortran_order': False") == std::string::npos)
        die(name + " is not in C order");

    Array array;
    array.dtype = field(header, "'descr':", '\'', '\'');
    std::string shape = field(header, "'shape':", '(', ')');
    for (char* at = shape.data(); *at != '\0';) {
        char* end = nullptr;
        unsigned long long n = std::strtoull(at, &end, 10);
        if (end != at) array.shape.push_back(n);
        at = end == at ? at + 1 : end;
    }
    array.bytes.assign(bytes.begin() + 10 + static_cast<std::ptrdiff_t>(header_bytes), bytes.end());
    return array;
}

double relative_error(std::span<const float> actual, std::span<const double> expected) {
    if (actual.size() != expected.size()) return std::numeric_limits<double>::infinity();
    double worst = 0;
    double largest = 0;
    for (std::size_t i = 0; i < expected.size(); ++i) {
        bool nan_a = std::isnan(actual[i]);
        bool nan_e = std::isnan(expected[i]);
        if (nan_a && nan_e) continue;
        if (nan_a != nan_e) return std::numeric_limits<double>::infinity();
        worst = std::max(worst, std::abs(static_cast<double>(actual[i]) - expected[i]));
        largest = std::max(largest, std::abs(expected[i]));
    }
    if (worst == 0) return 0;
    return worst / largest;
}

}  // namespace k3::test
