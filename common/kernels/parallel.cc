#include "common/kernels/parallel.h"

#include <sched.h>

#include <algorithm>
#include <atomic>

namespace k3::kernels {

namespace {

std::atomic<int> g_threads{0};  // 0: not set yet

int cores_of_this_process() noexcept {
    cpu_set_t allowed;
    CPU_ZERO(&allowed);
    if (sched_getaffinity(0, sizeof(allowed), &allowed) != 0) return 1;
    return std::max(1, CPU_COUNT(&allowed));
}

/// Rows a thread takes at once; a multiple of what the tables block by.
constexpr std::size_t kRowBlock = 48;

}  // namespace

void set_threads(int n_threads) noexcept {
    g_threads.store(n_threads > 0 ? n_threads : cores_of_this_process(), std::memory_order_relaxed);
}

int threads() noexcept {
    const int n = g_threads.load(std::memory_order_relaxed);
    if (n > 0) return n;
    set_threads(0);
    return g_threads.load(std::memory_order_relaxed);
}

void matmul(const KernelTable& table, const Matrix& w, const float* x, std::size_t x_stride,
            std::size_t n_rows, float* y, std::size_t y_stride) noexcept {
    const std::size_t n_blocks = (w.n_out + kRowBlock - 1) / kRowBlock;
    const std::size_t n_parts = std::min(n_blocks, static_cast<std::size_t>(threads()));
    if (n_parts <= 1 || w.n_out * w.n_in * n_rows < kMinParallelWork) {
        table.matmul(w, x, x_stride, n_rows, y, y_stride);
        return;
    }
    parallel_for(n_parts, [&](std::size_t part) {
        const std::size_t first = part * n_blocks / n_parts * kRowBlock;
        const std::size_t last = std::min((part + 1) * n_blocks / n_parts * kRowBlock, w.n_out);
        table.matmul(w.rows(first, last - first), x, x_stride, n_rows, y + first, y_stride);
    });
}

}  // namespace k3::kernels
