#pragma once
// Commands on the nodes of a Slurm job, each a step of it: `srun --jobid=JOB --nodelist=NODE ...`.

#include <memory>
#include <string>

#include "launcher/remote.h"

namespace k3::launcher {

/// `srun`, `scontrol`: paths. Steps share all that the job has on their node, as the stages of one
/// box do; they see our environment, but for a runtime directory that their node lacks.
std::unique_ptr<Remote> make_slurm_remote(std::string srun, std::string scontrol, std::string job);

}  // namespace k3::launcher
