#pragma once
// One token out of a row of logits of the released vocabulary.

#include <nlohmann/json_fwd.hpp>

namespace k3::bench {

/// Prints the median time of each way to choose: greedy, penalties, temperature, and each filter.
nlohmann::json measure_sampling();

}  // namespace k3::bench
