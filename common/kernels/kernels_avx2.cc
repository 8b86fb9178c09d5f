// AVX2 and FMA: Haswell (2013), Zen and later.

#include <immintrin.h>

#include "common/kernels/variants.h"

namespace k3::kernels {

namespace {
// Each piece uses those above it, so the order is not the alphabet's.
// clang-format off
#include "common/kernels/math.inc"
#include "common/kernels/weights.inc"
#include "common/kernels/vector_avx2.inc"
#include "common/kernels/dot_lanes.inc"
#include "common/kernels/ops_matrix.inc"
#include "common/kernels/ops_elementwise.inc"
#include "common/kernels/ops_attention.inc"
#include "common/kernels/table.inc"
// clang-format on

constexpr KernelTable kTable = make_table("avx2");
}  // namespace

const KernelTable& avx2_table() noexcept { return kTable; }

}  // namespace k3::kernels
