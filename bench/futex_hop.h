#pragma once
// The least that a hop between two sleeping threads costs on this machine.

#include <cstddef>
#include <vector>

#include "common/base/cores.h"
#include "common/base/result.h"

namespace k3::bench {

/// Microseconds of each of n round trips: this thread wakes another one that sleeps in a futex, and
/// is woken by it in the same way. Nothing is carried. `ends`: the core that this thread keeps to
/// from now on, and that of the other one; both run wherever they like if it is empty.
/// Errors: those of keep_to_cores.
Result<std::vector<double>> futex_round_trips(std::size_t n, const CoreSet& ends);

}  // namespace k3::bench
