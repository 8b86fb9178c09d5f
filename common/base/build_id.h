#pragma once
// Which binary this process runs.

#include <string>

namespace k3 {

/// The linker's digest of the running program in hexadecimal (note GNU_BUILD_ID): two processes
/// have the same one if they run the same binary. Empty if the linker wrote none.
std::string build_id();

}  // namespace k3
