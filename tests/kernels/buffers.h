#pragma once
// Buffers for kernel calls: guarded at both ends, off alignment by any number of elements, filled
// with reproducible values.

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "tests/kernels/operations.h"

namespace k3::test {

/// splitmix64: the same values everywhere, fast enough for buffers beyond any cache.
class Random {
  public:
    explicit Random(std::uint64_t seed) : state_(seed) {}
    std::uint64_t next() {
        std::uint64_t z = state_ += 0x9E3779B97F4A7C15U;
        z = (z ^ z >> 30U) * 0xBF58476D1CE4E5B9U;
        z = (z ^ z >> 27U) * 0x94D049BB133111EBU;
        return z ^ z >> 31U;
    }
    std::size_t below(std::size_t n) { return static_cast<std::size_t>(next() % n); }

    float value(Values values) {
        constexpr float kExtremes[] = {
            0.0F,   -0.0F, 1e-45F,  -1e-42F,     1.1754944e-38F, 1e-30F, -3.4e38F,        1e20F,
            -1e15F, 90.0F, -110.0F, 16777217.0F, 0x1.8p-126F,    1.0F,   __builtin_inff()};
        const std::uint64_t bits = next();
        if (values == Values::extreme && bits % 5 == 0)
            return kExtremes[(bits >> 8U) % std::size(kExtremes)];
        return static_cast<float>(static_cast<std::int32_t>(bits >> 32U)) * 0x1p-30F;  // [-2, 2)
    }

  private:
    std::uint64_t state_;
};

template <typename T>
class Buffer {
  public:
    Buffer(std::size_t n, std::size_t skew)
        : storage_(n + skew + 2 * kGuard, guard()), first_(kGuard + skew), size_(n) {}

    T* data() { return storage_.data() + first_; }
    const T* data() const { return storage_.data() + first_; }
    std::size_t size() const { return size_; }
    std::span<T> all() { return {data(), size_}; }
    T& operator[](std::size_t i) { return data()[i]; }

    bool guards_intact() const {
        const auto is_guard = [](T value) { return value == guard(); };
        const auto first = static_cast<std::ptrdiff_t>(first_);
        const auto last = static_cast<std::ptrdiff_t>(first_ + size_);
        return std::all_of(storage_.begin(), storage_.begin() + first, is_guard) &&
               std::all_of(storage_.begin() + last, storage_.end(), is_guard);
    }

  private:
    static constexpr std::size_t kGuard = 64;
    static constexpr T guard() { return static_cast<T>(93); }

    std::vector<T> storage_;
    std::size_t first_;
    std::size_t size_;
};

inline Buffer<float> random_floats(std::size_t n, std::size_t skew, Values values, Random& random) {
    Buffer<float> buffer(n, skew);
    for (float& value : buffer.all()) value = random.value(values);
    return buffer;
}

/// Appends the bits of `values`; every NaN counts as the same, because its payload may depend on
/// the order of an instruction's operands, which no variant promises.
inline void append_bits(std::span<const float> values, std::vector<std::uint32_t>& bits) {
    for (float value : values)
        bits.push_back(value == value ? std::bit_cast<std::uint32_t>(value) : 0x7FC00000U);
}

}  // namespace k3::test
