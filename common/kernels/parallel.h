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
///
/// One thread does it alone without OpenMP: GCC's runtime takes memory for a team whenever its size
/// is not that of the last one.
template <typename Body>
void parallel_for(std::size_t n, const Body& body) noexcept {
    const int n_threads = threads();
    if (n <= 1 || n_threads <= 1) {
        for (std::size_t i = 0; i < n; ++i) body(i);
        return;
    }
// Dynamic: a thread that another process keeps from its core must not keep the others waiting.
#pragma omp parallel for schedule(dynamic) num_threads(n_threads)
    for (std::size_t i = 0; i < n; ++i) body(i);
}

/// Below this many multiply-adds threads cost more than they save (a wake-up is some 5 us).
inline constexpr std::size_t kMinParallelWork = std::size_t{1} << 17U;

/// The same on one thread when there is little to do: `work_per_item` is in multiply-adds.
template <typename Body>
void parallel_for(std::size_t n, std::size_t work_per_item, const Body& body) noexcept {
    if (n * work_per_item < kMinParallelWork) {
        for (std::size_t i = 0; i < n; ++i) body(i);
        return;
    }
    parallel_for(n, body);
}

}  // namespace k3::kernels
