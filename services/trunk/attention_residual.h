#pragma once
// The residual stream of a step: per row the snapshots taken so far and the running prefix sum.
// Spec sections 3.2 to 3.4.
//
// A row's vectors lie one after another, snapshots oldest first, the prefix last. Taking a
// snapshot therefore copies nothing: the finished prefix stays where it is and becomes the newest
// snapshot, and a new prefix begins behind it. It is also the layout between stages, so a stage's
// output is this buffer.
//
// The mix is computed in the plain form, on every path: merging the prefix into a mix of the
// snapshots computed earlier would round differently at stage cuts.

#include <cstddef>
#include <cstdint>
#include <span>

#include "common/base/result.h"
#include "common/kernels/kernel_table.h"
#include "common/model/config.h"
#include "services/trunk/buffer.h"
#include "services/trunk/layer_range.h"
#include "services/trunk/observer.h"

namespace k3::trunk {

class ResidualStream {
  public:
    /// Most vectors of one row, as the kernel's table takes them.
    static constexpr std::size_t kMaxVectors = 32;

    /// Error: unsupported if a row of this model would carry more than kMaxVectors vectors.
    static Result<ResidualStream> create(const model::ModelConfig& config, LayerRange range,
                                         std::size_t max_rows);

    /// Begins a step of rows that carry `n_vectors` vectors each (1: only a prefix).
    void begin(std::size_t n_rows, std::size_t n_vectors) noexcept;
    /// Where vector `i` of row r lies, [hidden_size].
    float* vector(std::size_t r, std::size_t i) noexcept {
        return data_.data() + r * stride() + i * hidden_size_;
    }
    float* prefix(std::size_t r) noexcept { return vector(r, n_snapshots_); }
    std::size_t n_snapshots() const noexcept { return n_snapshots_; }
    /// Floats from one row to the next.
    std::size_t stride() const noexcept { return max_vectors_ * hidden_size_; }
    RowsView prefix_view() const noexcept;
    /// All vectors of all rows, [n_rows, n_snapshots + 1, hidden_size]; only at the end of a range
    /// that is not the last, where every place of a row is in use.
    std::span<const float> contents() const noexcept;

    /// out[i] = mix of row rows[i]; plain copy of the prefix while there are no snapshots.
    void mix(const kernels::KernelTable& table, std::span<const std::uint32_t> rows,
             std::span<const float> query, float* out) noexcept;
    /// Softmax weights of the last mix, [n_rows, n_snapshots + 1].
    RowsView mix_weights() const noexcept;

    /// The prefix becomes a snapshot, and the next add() begins a new one.
    void take_snapshot() noexcept;
    /// prefix += y, row by row; begins the prefix after a snapshot.
    void add(const kernels::KernelTable& table, const float* y) noexcept;

  private:
    std::size_t hidden_size_ = 0;
    std::size_t max_vectors_ = 0;
    float eps_ = 0;
    std::size_t n_rows_ = 0;
    std::size_t n_snapshots_ = 0;
    bool prefix_is_empty_ = false;
    std::size_t n_mixed_ = 0;
    Buffer<float> data_;     // [max_rows, max_vectors, hidden_size]
    Buffer<float> weights_;  // [max_rows, max_vectors]
};

}  // namespace k3::trunk
