#pragma once
// Scattering of small numbers over 64 bits.

#include <cstdint>

namespace k3 {

/// The finaliser of splitmix64: a bijection in which every bit of x changes half of the result's.
constexpr std::uint64_t splitmix_finalise(std::uint64_t x) noexcept {
    x = (x ^ (x >> 30U)) * 0xbf58476d1ce4e5b9ULL;
    x = (x ^ (x >> 27U)) * 0x94d049bb133111ebULL;
    return x ^ (x >> 31U);
}

}  // namespace k3
