#pragma once
// A pipeline for those who have something that starts processes already: units for systemd,
// manifests for Kubernetes. Command lines are those of make_plan(), limits those of plan_memory().

#include <cstdint>
#include <filesystem>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "common/base/result.h"
#include "launcher/cli.h"
#include "launcher/pipeline_file.h"
#include "launcher/stage_plan.h"

namespace k3::launcher {

/// What every rendered file begins with: only such files are replaced.
inline constexpr std::string_view kRenderedMagic = "# Made by k3pipe render";

struct RenderedFile {
    std::filesystem::path name;  // relative, "k3pipe-demo.target", "laptop/k3pipe-demo.target"
    std::string text;
};

/// Memory of one stage, its shared-memory segments apart.
struct StageBudget {
    std::uint64_t process_bytes = 0;
    std::uint64_t segment_bytes = 0;
    std::string open;  // why there can be no limit: "session_bytes is not set"; empty: there can

    std::uint64_t bytes() const noexcept { return process_bytes + segment_bytes; }
    /// What the stage may take before it is killed: an eighth and 256 MiB above the plan, for
    /// messages that wait and what the kernel counts besides.
    std::uint64_t limit_bytes() const noexcept;
};

/// By name of the stage, of those that are to be started. Sizes are those of the pipeline's model
/// here; of a stage on another box they stay open if it is not here.
/// Errors: those of make_plan(), open_weights() and plan_memory().
Result<std::map<std::string, StageBudget>> stage_budgets(const PipelineSpec& spec);

/// The stage's variables, with those that the launcher sets (common/kernels/idle_threads.h).
std::vector<std::pair<std::string, std::string>> rendered_environment(const StagePlan& stage);

/// A program of ours as the place that is rendered for has it: in `folder`, or as the plan says.
void place_program(const std::filesystem::path& folder, bool is_ours, StagePlan* stage);

/// One unit for each stage and a target for all of them; for each box a folder, if there are
/// several. Errors: those of make_plan(); invalid_argument (a stage that needs a terminal, programs
/// of another box nobody knows the place of); unsupported.
Result<std::vector<RenderedFile>> render_systemd(const RenderCommand& command, PipelineSpec spec);

/// The secret that manifests refer to unless told another: "k3pipe-demo-keys".
std::string kubernetes_keys_secret(std::string_view pipeline);

/// Manifests, one for each object. Errors: those of make_plan(); invalid_argument (hosts, sockets
/// or names that a cluster cannot have).
Result<std::vector<RenderedFile>> render_kubernetes(const RenderCommand& command,
                                                    PipelineSpec spec);

}  // namespace k3::launcher
