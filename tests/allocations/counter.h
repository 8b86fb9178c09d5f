#pragma once
// How often this program took memory, from any thread and by any name: new, malloc, calloc and the
// rest. Only for a test program of its own, because the whole program is counted.

#include <cstddef>

namespace k3::test {

/// Since the program began.
std::size_t n_allocations() noexcept;

}  // namespace k3::test
