// AVX-512 (F, BW, DQ, VL): Skylake-X (2017), Zen 4 and later.

// gcc 12 takes the "undefined" operands inside its own intrinsics for mistakes.
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif
#include <immintrin.h>
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic pop
#endif

#include "common/kernels/variants.h"

namespace k3::kernels {

namespace {
// Each piece uses those above it, so the order is not the alphabet's.
// clang-format off
#include "common/kernels/math.inc"
#include "common/kernels/weights.inc"
#include "common/kernels/vector_avx512.inc"
#include "common/kernels/dot_lanes.inc"
#include "common/kernels/ops_matrix.inc"
#include "common/kernels/ops_elementwise.inc"
#include "common/kernels/ops_attention.inc"
#include "common/kernels/table.inc"
// clang-format on

constexpr KernelTable kTable = make_table("avx512");
}  // namespace

const KernelTable& avx512_table() noexcept { return kTable; }

}  // namespace k3::kernels
