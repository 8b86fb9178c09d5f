#pragma once
// The memory of a pipeline, process by process, before anything is started.
//
// All numbers come from common/model/memory_plan.h, which the services size themselves with.

#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

#include "common/base/cores.h"
#include "common/base/memory.h"
#include "common/base/result.h"
#include "launcher/stage_plan.h"
#include "launcher/stage_weights.h"

namespace k3::launcher {

struct MemoryItem {
    std::string what;
    std::uint64_t bytes = 0;
};

struct ProcessMemory {
    std::string name;
    std::vector<MemoryItem> items;
    std::uint64_t bytes() const noexcept;
};

struct PipelineMemory {
    std::vector<ProcessMemory> processes;  // the launcher first
    ProcessMemory segments;                // shared memory, counted once
    std::vector<std::string> notes;        // one line each: what a session needs, what 0 stands for
    std::uint64_t trunk_token_bytes = 0;   // of weights that are read again for every token
    std::uint64_t expert_slots = 0;        // of all servers
    std::map<std::string, std::uint64_t> slots_of;  // of each, by name
    std::uint64_t experts_held = 0;                 // by all servers
    std::uint64_t bytes() const noexcept;
};

/// Of the stages that are started here; an attached one has its own memory elsewhere.
/// `weights`: of this plan. `free_bytes`: what budgets of 0 are a quarter of.
/// Errors: invalid_argument (a setting that cannot be read, with the stage's table),
/// resource_exhausted (a cache of fewer than two experts, both numbers).
Result<PipelineMemory> plan_memory(const PipelinePlan& plan, const StageWeights& weights,
                                   const MachineCores& machine, std::uint64_t free_bytes);

/// The table, ending in whether it fits what is available.
std::string memory_table(const PipelineMemory& memory, const AvailableMemory& available);

}  // namespace k3::launcher
