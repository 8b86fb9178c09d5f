// NEON, which every 64-bit Arm CPU has: no flags, and no question to the CPU.

#include <arm_neon.h>

#include "common/kernels/variants.h"

namespace k3::kernels {

namespace {
// Each piece uses those above it, so the order is not the alphabet's.
// clang-format off
#include "common/kernels/math.inc"
#include "common/kernels/weights.inc"
#include "common/kernels/vector_neon.inc"
#include "common/kernels/dot_lanes.inc"
#include "common/kernels/ops_matrix.inc"
#include "common/kernels/ops_elementwise.inc"
#include "common/kernels/ops_attention.inc"
#include "common/kernels/table.inc"
// clang-format on

constexpr KernelTable kTable = make_table("neon");
}  // namespace

const KernelTable& neon_table() noexcept { return kTable; }

}  // namespace k3::kernels
