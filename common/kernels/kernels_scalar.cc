// The definition: what every variant must reproduce to the bit.

#include "common/kernels/variants.h"

namespace k3::kernels {

namespace {
// Each piece uses those above it, so the order is not the alphabet's.
// clang-format off
#include "common/kernels/math.inc"
#include "common/kernels/weights.inc"
#include "common/kernels/dot_plain.inc"
#include "common/kernels/ops_matrix.inc"
#include "common/kernels/ops_elementwise.inc"
#include "common/kernels/ops_attention.inc"
#include "common/kernels/table.inc"
// clang-format on

constexpr KernelTable kTable = make_table("scalar");
}  // namespace

const KernelTable& scalar_table() noexcept { return kTable; }

}  // namespace k3::kernels
