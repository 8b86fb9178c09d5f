#pragma once
// Products with weights that no cache holds, of one row, which is what a decode step spends its time
// on, and of as many as a prefill of 64 tokens has: with weights from a cache nothing shows whether
// they are asked for in time.

#include <nlohmann/json_fwd.hpp>
#include <vector>

namespace k3::bench {

/// Prints, for bf16 matrices and MXFP4 experts of the released dimensions, every variant and every
/// thread count, the share of this machine's read bandwidth over the same bytes. Passes of the read
/// probe and of the variants take turns; a share is the median over the turns of reading time by
/// product time of one turn, because the speed of a shared machine changes for minutes at a time. Then the same for several
/// rows, as a share of the variant's multiply-add peak.
nlohmann::json measure_from_ram(const std::vector<int>& thread_counts);

}  // namespace k3::bench
