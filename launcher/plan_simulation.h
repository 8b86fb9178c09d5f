#pragma once
// The part of `k3pipe plan` that replays a recorded routing over the boxes of a pipeline.

#include <string>

#include "common/base/result.h"
#include "common/experts/trace_replay.h"
#include "launcher/cli.h"
#include "launcher/plan_memory.h"
#include "launcher/speed.h"
#include "launcher/stage_plan.h"

namespace k3::launcher {

/// What boxes do whose tables say nothing.
struct SimulatedSpeeds {
    Speed memory;
    Speed disk;
};

/// Whether a box's disk has to be known from elsewhere than its table.
bool needs_disk_rate(const PipelinePlan& plan);

/// Two tables: the pipeline's expert servers as they are, and 1 to command.boxes equal boxes like
/// the first of them. Seconds are those of the trunk's weights, from memory or disk, whichever
/// takes longer, of the experts, and of the links to trunk stages of other boxes; what the trunk
/// computes while experts work is counted in full. `memory` is that of all stages.
/// Errors: invalid_argument (a share of an attached server that nobody knows, a rate that is
/// neither given nor measured), those of read_share and simulate.
Result<std::string> simulation_tables(const PlanCommand& command, const PipelinePlan& plan,
                                      const model::Model& model, const PipelineMemory& memory,
                                      const SimulatedSpeeds& speeds,
                                      const experts::RoutingTrace& trace);

}  // namespace k3::launcher
