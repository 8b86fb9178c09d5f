#pragma once
// What the compute threads of a process do between two parallel sections: sleep.
//
// By default OpenMP's threads spin for some milliseconds before they sleep, so a service that
// computes now and then keeps its cores busy in between, and takes them from the services that
// it waits for. Measured with the demo on 2 cores at load 7, trunk and expert server with 2
// threads each: 52 to 107 tokens/s spinning, 129 to 158 sleeping.

namespace k3::kernels {

/// To be called first in main(). Sets OMP_WAIT_POLICY=passive, unless the environment has
/// OMP_WAIT_POLICY or GOMP_SPINCOUNT: then the user has chosen.
///
/// GCC's runtime reads its environment before main() and has no call to change it later. So the
/// program replaces itself, once: same process, arguments and descriptors, and the variable set.
/// The launcher sets the variable for its children, so this happens only to services that are
/// started by hand. Under a debugger or valgrind it does not happen, because they would stop twice
/// or lose sight of the program; nor when the program's file has gone. Its threads spin then.
void let_idle_threads_sleep(char* const* argv) noexcept;

}  // namespace k3::kernels
