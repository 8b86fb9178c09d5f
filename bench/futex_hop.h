#pragma once
// The least that a hop between two sleeping threads costs on this machine.

#include <cstddef>
#include <vector>

namespace k3::bench {

/// Microseconds of each of n round trips: this thread wakes another one that sleeps in a futex, and
/// is woken by it in the same way. Nothing is carried. The other thread runs on core `there`, or
/// wherever it likes if that is negative.
std::vector<double> futex_round_trips(std::size_t n, int there);

}  // namespace k3::bench
