#include "common/kernels/parallel.h"

#include <algorithm>
#include <atomic>

#include "common/base/cores.h"

namespace k3::kernels {

namespace {

std::atomic<int> g_threads{0};  // 0: not set yet

/// Rows of weights that are never split; a multiple of what the tables block by.
constexpr std::size_t kRowBlock = 48;

/// Parts of a product that the threads take one by one: so many for each thread that the last ones
/// to end do not keep the others waiting for long. With several rows of activations, which each
/// part splits into lanes for itself, a part has four blocks if that leaves one part for each
/// thread.
std::size_t parts_of(std::size_t n_blocks, std::size_t n_rows) noexcept {
    const auto n_threads = static_cast<std::size_t>(threads());
    const std::size_t most = n_rows == 1 ? n_blocks : n_blocks / 4;
    return std::min(n_blocks, std::clamp(most, n_threads, 8 * n_threads));
}

}  // namespace

void set_threads(int n_threads) noexcept {
    if (n_threads <= 0) n_threads = static_cast<int>(machine_cores().allowed.size());
    g_threads.store(std::max(n_threads, 1), std::memory_order_relaxed);
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
    const std::size_t n_parts = parts_of(n_blocks, n_rows);
    if (n_parts <= 1 || threads() <= 1 || w.n_out * w.n_in * n_rows < kMinParallelWork) {
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
