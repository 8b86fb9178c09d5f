#pragma once
// Pipeline files for a box of some memory: `k3pipe init`.
//
// The budgets come from planning: the file with the smallest budgets is planned as `k3pipe plan`
// would, and what is left of the memory is dealt out to sessions and expert cache. So a file that
// is written fits by the same sum that the services refuse with.

#include <cstdint>
#include <string>
#include <vector>

#include "common/base/cores.h"
#include "common/base/memory.h"
#include "common/base/result.h"
#include "launcher/model_files.h"
#include "launcher/stage_weights.h"

namespace k3::launcher {

/// auto, 8g, 16g, 32g, 64g, 128g, max.
std::vector<std::string> preset_names();

struct Preset {
    std::string name;
    std::uint64_t bytes = 0;  // for all processes and segments together
};
/// "8g" is 8 GiB, less what the system itself needs (a twentieth); auto leaves a fifth of what is
/// free now to others, max a twentieth. Error: invalid_argument (no such preset).
Result<Preset> find_preset(const std::string& name, const AvailableMemory& available);

/// Opens them for a pipeline of one trunk and one expert server, which hold everything.
/// Errors: those of make_plan and open_weights.
Result<StageWeights> open_files(const ModelFiles& files, Models opened = {});

/// The text of a pipeline file; `weights` are those of `files`. Errors: resource_exhausted if the
/// smallest legal configuration needs more (both numbers), those of make_plan.
Result<std::string> preset_file(const Preset& preset, const ModelFiles& files,
                                const StageWeights& weights, const MachineCores& machine);

}  // namespace k3::launcher
