#pragma once
// The variants of the kernel table: one object file per instruction set.
//
// A variant is a .cc file compiled with its own ISA flags that includes the pieces (*.inc) inside
// an unnamed namespace and exports one function. Nothing else may leave the object: an inline
// function compiled with ISA flags could be the copy that the linker keeps for everyone and fault
// on an older CPU. So variants include only the contract, intrinsics and C headers, and use
// compiler builtins for the rest (tests/kernels checks the symbols).
//
//   math.inc             exp, sigmoid, tanh
//   weights.inc          stored weights to fp32
//   dot_plain.inc        the lane and column contracts as plain loops: the definition
//   vector_*.inc         registers of an instruction set: load, fma, weights straight into lanes
//   dot_lanes.inc        the same contracts on those registers, blocked for caches
//   ops_*.inc, table.inc everything else, written once; the compiler vectorises its loops
//
// A further variant brings its vector_*.inc and a .cc like kernels_avx2.cc, and is
// added to meson.build and to the list in kernel_table.cc. It may replace dot_lanes.inc or any
// operation: the equality tests compare its table with the scalar one, whatever it is made of.

#include "common/kernels/kernel_table.h"

namespace k3::kernels {

const KernelTable& scalar_table() noexcept;
#if defined(K3_HAVE_AVX2)
const KernelTable& avx2_table() noexcept;
#endif
#if defined(K3_HAVE_AVX512)
const KernelTable& avx512_table() noexcept;
#endif
#if defined(K3_HAVE_NEON)
const KernelTable& neon_table() noexcept;
#endif

}  // namespace k3::kernels
