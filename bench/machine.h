#pragma once
// What this machine can do, measured: the limits that kernel speeds are compared with.

#include <string>
#include <string_view>

namespace k3::bench {

/// CPU model as the kernel names it, "unknown" where it does not.
std::string cpu_model();

/// Bytes per second of `n_threads` threads reading memory that no cache holds.
double read_bandwidth(int n_threads);

/// Fused multiply-add throughput of `n_threads` threads in floating-point operations per second (2
/// per multiply-add) with the registers of a kernel variant of this CPU: "avx512", "avx2", "neon",
/// or what every CPU has for any other name.
double fma_peak(int n_threads, std::string_view isa);

/// Seconds since some start.
double now();

}  // namespace k3::bench
