#pragma once
// Products of one row with weights that no cache holds: what a decode step spends its time on.

#include <nlohmann/json_fwd.hpp>
#include <vector>

namespace k3::bench {

/// Prints, for bf16 matrices and MXFP4 experts of the released dimensions, every variant and every
/// thread count, the share of this machine's read bandwidth over the same bytes. Passes of the read
/// probe and of the variants take turns; a share is the median over the turns of reading time by
/// product time of one turn, because the speed of a shared machine changes for minutes at a time.
nlohmann::json measure_from_ram(const std::vector<int>& thread_counts);

}  // namespace k3::bench
