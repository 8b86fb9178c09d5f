#include "services/trunk/products.h"

#include "common/base/check.h"
#include "common/kernels/parallel.h"

namespace k3::trunk {

Status Products::matmul(const Matrix& w, const float* x, std::size_t x_stride, std::size_t n_rows,
                        float* y, std::size_t y_stride) const {
    if (w.is_in_memory()) {
        kernels::matmul(*table_, w.stored, x, x_stride, n_rows, y, y_stride);
        return Status::ok();
    }
    for (std::size_t done = 0; done < w.n_out();) {
        ASSIGN_OR_RETURN(const MatrixRows piece, weights_->next_rows(w));
        K3_CHECK(piece.first() == done, "pieces of a matrix come in order");
        kernels::matmul(*table_, piece.rows(), x, x_stride, n_rows, y + done, y_stride);
        done += piece.rows().n_out;
    }
    return Status::ok();
}

Result<MatrixRows> Products::whole(const Matrix& w) const {
    if (w.is_in_memory()) return MatrixRows(w.stored, 0, nullptr);
    ASSIGN_OR_RETURN(MatrixRows rows, weights_->next_rows(w));
    K3_CHECK(rows.rows().n_out == w.n_out(), "a matrix that is used as a whole is one piece");
    return rows;
}

}  // namespace k3::trunk
