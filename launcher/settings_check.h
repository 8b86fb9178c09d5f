#pragma once
// Whether the services accept the settings that a plan gives them, asked before anything starts.

#include "common/base/result.h"
#include "launcher/stage_plan.h"

namespace k3::launcher {

/// Runs every program of ours of this box with its arguments and `--check`: it reads its settings,
/// its keys and its cores, and ends. Wrapped stages and stand-ins are left out, as what they are
/// given is not ours to judge. `stop_fd` (-1: none): readable to give up.
/// Errors: what the first service in the plan's order says, with its table in the pipeline file and
/// the code that it ended with; cancelled.
Status check_settings(const PipelinePlan& plan, int stop_fd = -1);

}  // namespace k3::launcher
