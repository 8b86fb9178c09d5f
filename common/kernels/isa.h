#pragma once
// Whether kernels() will find a table. Not in kernel_table.h, which is compiled with wider
// instruction sets than this CPU may have, and must draw in no inline function of the library.

#include "common/base/result.h"

namespace k3::kernels {

/// Errors: invalid_argument (K3_ISA is unknown, or this build or CPU lacks it; names what there
/// is).
Status check_isa();

}  // namespace k3::kernels
