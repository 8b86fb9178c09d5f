#pragma once
// The cores and threads of a stage, for people (`k3pipe plan`).

#include <string>

#include "common/base/cores.h"
#include "common/base/result.h"
#include "launcher/stage_plan.h"

namespace k3::launcher {

/// "2 threads on cores 0-1" for a stage that computes, "core 3" for another that was given some,
/// else nothing. What a wrapper leaves to its stage is not known here.
/// Errors: invalid_argument, naming the stage's table (its cores are no list, or not to be had on
/// this machine).
Result<std::string> describe_cores(const StagePlan& stage, const MachineCores& machine);

}  // namespace k3::launcher
