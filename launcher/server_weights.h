#pragma once
// What the expert servers of a pipeline file weigh in a placement.

#include <cstdint>
#include <vector>

#include "common/base/result.h"
#include "launcher/pipeline_file.h"

namespace k3::launcher {

/// Of each expert server, in the order of the file: its `weight`; without any weight in the file in
/// proportion to `cache_bytes`, if all servers have that; else all the same.
/// Error: invalid_argument (only some have a weight, or a cache_bytes that is no size), with the
/// line.
Result<std::vector<std::uint32_t>> server_weights(const PipelineSpec& spec);

}  // namespace k3::launcher
