#pragma once
// Which stage of a pipeline runs on which node of a Slurm job.
//
// Expert servers and then trunk stages, each in the order of the file, are dealt over the nodes in
// the order in which Slurm lists them, beginning again at the first when all have one. A stage whose
// `host` names a node runs there. Tokenizer, sampler and gateway stay beside the launcher: they need
// next to nothing, and so nobody has to connect to the box on which it was started.

#include <cstddef>
#include <string>
#include <vector>

#include "common/base/result.h"
#include "launcher/pipeline_file.h"
#include "launcher/slurm_allocation.h"

namespace k3::launcher {

/// How many nodes a job of the pipeline's own has: `nodes` of [slurm], or one for each stage that is
/// dealt. Error: invalid_argument (nothing to deal; more nodes than stages; the terminal is wanted).
Result<std::size_t> nodes_for(const PipelineSpec& spec);

/// Gives every dealt stage its `host`, and every node that has stages a HostSpec with its address
/// (that of its table in the file, or else as Slurm knows it) on which our own programs may lie
/// where they lie here. Error: invalid_argument (a `host` that is no node of the job).
Status place_on_nodes(PipelineSpec* spec, const SlurmAllocation& allocation);
Status place_on_nodes(PipelineSpec* spec, const std::string& job,
                      const std::vector<SlurmNode>& nodes);

/// As it would be planned on nodes that nobody knows yet, with addresses that are nobody's: to find
/// the mistakes of a file before a job waits in a queue.
PipelineSpec placed_somewhere(const PipelineSpec& spec, std::size_t n_nodes);

}  // namespace k3::launcher
