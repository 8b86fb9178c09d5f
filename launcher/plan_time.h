#pragma once
// How long a token will take, from what it reads and how fast this machine reads.

#include <string>

#include "common/model/config.h"
#include "launcher/plan_memory.h"
#include "launcher/speed.h"

namespace k3::launcher {

/// What one token of one request reads.
struct TokenReads {
    std::uint64_t touched_bytes = 0;  // of memory: every weight that is computed with
    std::uint64_t trunk_bytes = 0;    // of the disk: weights of the trunk that are not kept
    std::uint64_t expert_bytes = 0;   // of the disk, if the cache does not hold all and none hits
    std::uint64_t disk_bytes() const noexcept { return trunk_bytes + expert_bytes; }
};
TokenReads token_reads(const model::ModelConfig& config, const PipelineMemory& memory);

/// The table. The prediction adds all times: an upper bound, because reads of the trunk overlap
/// computing, and some of those of experts do.
std::string time_table(const TokenReads& reads, const Speed& memory, const Speed& disk);

}  // namespace k3::launcher
