#include "launcher/render.h"

#include <fmt/format.h>

#include <algorithm>

#include "common/base/cores.h"
#include "common/base/memory.h"
#include "common/kernels/idle_threads.h"
#include "launcher/plan_memory.h"
#include "launcher/stage_weights.h"

namespace k3::launcher {

namespace fs = std::filesystem;
using msg::ServiceKind;

namespace {

constexpr std::uint64_t kSpareBytes = std::uint64_t{256} << 20U;

/// The pipeline as if all of it were started here, which is what sizes are counted of.
PipelineSpec as_local(const PipelineSpec& spec) {
    PipelineSpec local = spec;
    local.insecure = true;
    local.keys.clear();
    for (StageSpec& stage : local.stages) {
        if (!stage.host.empty()) {
            stage.model.clear();
            std::erase_if(stage.settings, [](const ServiceSetting& s) { return s.name == "pack"; });
        }
        stage.host.clear();
        stage.listen.clear();
        stage.wrap.clear();
        stage.binary.clear();
        stage.terminal = false;
    }
    return local;
}

/// Which budget decides how much the stage takes, and nobody has given.
std::string open_budget(const StagePlan& stage) {
    const char* key = stage.kind == ServiceKind::trunk     ? "session_bytes"
                      : stage.kind == ServiceKind::experts ? "cache_bytes"
                                                           : nullptr;
    if (key == nullptr || !setting_of(stage, key, "").empty()) return "";
    return fmt::format("{} is not set", key);
}

std::uint64_t segments_of(const PipelineMemory& memory, const std::string& stage) {
    std::uint64_t bytes = 0;
    for (const MemoryItem& item : memory.segments.items)
        if (item.what.starts_with(stage + ", ")) bytes += item.bytes;
    return bytes;
}

}  // namespace

std::uint64_t StageBudget::limit_bytes() const noexcept {
    constexpr std::uint64_t kMiB = std::uint64_t{1} << 20U;
    return (bytes() + bytes() / 8 + kSpareBytes + kMiB - 1) / kMiB * kMiB;
}

Result<std::map<std::string, StageBudget>> stage_budgets(const PipelineSpec& spec) {
    std::map<std::string, StageBudget> budgets;
    PipelineSpec sized = as_local(spec);
    std::error_code code;
    const bool has_model = fs::is_directory(spec.model, code);
    for (std::size_t i = 0; i < spec.stages.size(); ++i) {
        if (spec.stages[i].host.empty() || has_model) continue;
        for (const StageSpec& stage : spec.stages)
            budgets[stage.name].open = fmt::format("{} is not on this box", spec.model.string());
        return budgets;
    }
    ASSIGN_OR_RETURN(const PipelinePlan plan, make_plan(sized, "/run/k3pipe", 0));
    ASSIGN_OR_RETURN(const StageWeights weights, open_weights(plan));
    ASSIGN_OR_RETURN(const AvailableMemory available, available_memory());
    ASSIGN_OR_RETURN(const PipelineMemory memory,
                     plan_memory(plan, weights, machine_cores(), available.bytes));
    for (const StagePlan& stage : plan.stages) {
        const auto found = std::ranges::find(memory.processes, stage.name, &ProcessMemory::name);
        if (found == memory.processes.end()) continue;  // attached
        budgets[stage.name] = {found->bytes(), segments_of(memory, stage.name), open_budget(stage)};
    }
    return budgets;
}

std::vector<std::pair<std::string, std::string>> rendered_environment(const StagePlan& stage) {
    auto variables = stage.env;
    const bool is_chosen = std::ranges::any_of(variables, [](const auto& variable) {
        return std::ranges::any_of(kernels::kIdleThreads,
                                   [&](const auto& ours) { return variable.first == ours.first; });
    });
    if (!is_chosen)
        for (const auto& [name, value] : kernels::kIdleThreads) variables.emplace_back(name, value);
    return variables;
}

void place_program(const fs::path& folder, bool is_ours, StagePlan* stage) {
    if (!is_ours || folder.empty()) return;
    stage->argv[stage->n_wrap] = (folder / fmt::format("k3-{}", to_string(stage->kind))).string();
}

}  // namespace k3::launcher
