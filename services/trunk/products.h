#pragma once
// Products with the matrices of the trunk, wherever these are.
//
// Rows of a product do not depend on each other, so a matrix that comes in pieces gives the bits of
// one that lies in memory.

#include <cstddef>

#include "common/base/result.h"
#include "common/kernels/kernel_table.h"
#include "services/trunk/weights.h"

namespace k3::trunk {

class Products {
  public:
    /// Borrows both.
    Products(const kernels::KernelTable& table, WeightSource& weights) noexcept
        : table_(&table), weights_(&weights) {}

    const kernels::KernelTable& table() const noexcept { return *table_; }

    /// kernels::matmul of common/kernels/parallel.h. Errors: those of WeightSource::next_rows.
    Status matmul(const Matrix& w, const float* x, std::size_t x_stride, std::size_t n_rows,
                  float* y, std::size_t y_stride) const;

    /// All rows at once, of a matrix that is used as a whole. Errors: as matmul.
    Result<MatrixRows> whole(const Matrix& w) const;

  private:
    const kernels::KernelTable* table_;
    WeightSource* weights_;
};

}  // namespace k3::trunk
