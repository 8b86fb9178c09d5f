#pragma once
// Which cores a process computes on.

#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "common/base/result.h"

namespace k3 {

/// Numbers of cores as Linux counts them, ascending, each once.
using CoreSet = std::vector<int>;

/// "0-7,16" -> 0, 1, ..., 7, 16. Overlaps are fine.
/// Error: invalid_argument, naming the text and what is wrong with it.
Result<CoreSet> parse_cores(std::string_view text);
/// 0, 1, ..., 7, 16 -> "0-7,16".
std::string format_cores(const CoreSet& cores);

/// What there is to choose from.
struct MachineCores {
    int n_cores = 0;  // of the machine, online or not
    CoreSet allowed;  // where the calling thread may run
};
MachineCores machine_cores();

/// Error: invalid_argument, naming a core that this machine does not have, or all those on which
/// this process may not run (taskset, a container), and what there is instead.
Status check_cores(const CoreSet& cores, const MachineCores& machine);

/// What one process computes with.
struct CoreUse {
    CoreSet cores;
    std::size_t n_threads = 0;
};

/// True if a core is left for every thread: in each process, and in all of them together.
bool has_core_for_each(std::span<const CoreUse> processes);

/// Keeps the calling thread, and every thread that it will start, to these cores; an empty text
/// leaves all that are allowed. To be called before there are other threads: they stay where they
/// are, and memory lies on the NUMA node of whoever touches it first.
/// Errors: those of parse_cores and check_cores.
Status keep_to_cores(std::string_view text);

}  // namespace k3
