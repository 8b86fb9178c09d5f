#pragma once
// The random numbers of a request: a pure function of its seed and of a counter.
//
// A generator with state would tie a token to everything drawn before it in the process. Here the
// number of token n of a request depends on (seed, n) only, so it is the same in any batch, after a
// restart, and on every machine. Philox4x32-10 is the counter-based generator of Salmon, Moraes,
// Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3" (SC 2011), table 2 and section 3.3;
// integer arithmetic only.

#include <array>
#include <cstdint>

namespace k3::sampler {

/// Ten rounds of Philox4x32.
std::array<std::uint32_t, 4> philox4x32(std::array<std::uint32_t, 4> counter,
                                        std::array<std::uint32_t, 2> key) noexcept;

/// Uniform in [0, 1), a multiple of 2^-53. `step_index` counts the tokens of the request.
double uniform(std::uint64_t seed, std::uint64_t step_index) noexcept;

}  // namespace k3::sampler
