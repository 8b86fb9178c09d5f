#pragma once
// OpenMP over output rows or heads; never over a reduction, so the bits do not depend on threads.

#include <cstddef>

#include "common/kernels/kernel_table.h"

namespace k3::kernels {

/// Threads used by the functions below in this process; set once at start. 0 means one per core
/// this process may run on.
void set_threads(int n_threads) noexcept;
int threads() noexcept;

/// table.matmul with the output rows split over threads.
void matmul(const KernelTable& table, const Matrix& w, const float* x, std::size_t x_stride,
            std::size_t n_rows, float* y, std::size_t y_stride) noexcept;

/// Calls body(i) for i in [0, n), split over threads; body must not throw.
template <typename Body>
void parallel_for(std::size_t n, const Body& body) noexcept {
#pragma omp parallel for schedule(static) num_threads(threads()) if (n > 1)
    for (std::size_t i = 0; i < n; ++i) body(i);
}

}  // namespace k3::kernels
