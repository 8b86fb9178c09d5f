#pragma once
// What the compute threads of a process do between two parallel sections: spin for some 60 us, as
// long as the next section usually takes to come, and then sleep.
//
// Sleeping at once costs a wake-up (65 us on the machine measured) at each of some hundred sections
// of a token: 330 ms instead of 316 ms for a step of the benchmark, 7 % instead of 3 % above the
// same work in one process. Spinning for milliseconds, OpenMP's default, takes the cores from the
// services that a service waits for: the demo on 2 cores at load 7, trunk and expert server with 2
// threads each, made 52 to 107 tokens/s, and 129 to 158 with sleeping threads.

#include <array>
#include <utility>

namespace k3::kernels {

/// The variables for it: GCC's runtime lets the second decide, LLVM's knows only the first.
inline constexpr std::array<std::pair<const char*, const char*>, 2> kIdleThreads = {
    {{"OMP_WAIT_POLICY", "passive"}, {"GOMP_SPINCOUNT", "3000"}}};

/// To be called first in main(). Sets kIdleThreads, unless the environment has one of them: then
/// the user has chosen.
///
/// GCC's runtime reads its environment before main() and has no call to change it later. So the
/// program replaces itself, once: same process, arguments and descriptors, and the variables set.
/// The launcher sets them for its children, so this happens only to services that are started by
/// hand. Under a debugger or valgrind it does not happen, because they would stop twice or lose
/// sight of the program; nor when the program's file has gone. Its threads spin then.
void let_idle_threads_sleep(char* const* argv) noexcept;

}  // namespace k3::kernels
