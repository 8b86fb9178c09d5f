// `k3pipe plan`: what would start, with exact command lines, memory, and the time of a token.

#include <fmt/format.h>

#include <algorithm>

#include "common/base/memory.h"
#include "common/base/settings.h"
#include "common/model/layer_range.h"
#include "common/model/placement_file.h"
#include "common/model/tensor_names.h"
#include "common/transport/endpoint.h"
#include "launcher/commands.h"
#include "launcher/hosts.h"
#include "launcher/pipeline_file.h"
#include "launcher/pipeline_keys.h"
#include "launcher/plan_memory.h"
#include "launcher/plan_model.h"
#include "launcher/plan_simulation.h"
#include "launcher/plan_time.h"
#include "launcher/run_directory.h"
#include "launcher/settings_check.h"
#include "launcher/speed.h"
#include "launcher/stage_cores.h"
#include "launcher/stage_plan.h"
#include "launcher/stage_weights.h"
#include "launcher/words.h"

namespace k3::launcher {

using msg::ServiceKind;

namespace {

constexpr double kMemorySeconds = 0.05;
constexpr std::size_t kMemoryBytes = std::size_t{128} << 20U;  // less than an index takes later
constexpr double kDiskSeconds = 0.5;

/// "layers 0-92", "share '0/3': 27478 experts, 449 GiB on disk".
Result<std::string> holds_of(const StagePlan& stage, const model::Model& model) {
    const model::ModelConfig& config = model.config;
    if (stage.kind == ServiceKind::trunk) {
        ASSIGN_OR_RETURN(const model::LayerRange range,
                         model::parse_layers(setting_of(stage, "layers", "all"), config));
        return fmt::format("layers {}-{}", range.first, range.end() - 1);
    }
    if (stage.kind != ServiceKind::experts) return std::string();
    const std::string share = setting_of(stage, "share", "all");
    ASSIGN_OR_RETURN(const model::Share given, model::read_share(share, model));
    return fmt::format("share '{}': {} experts, {} on disk", share, given.held.count(),
                       format_bytes(given.held.count() * model::expert_bytes(config)));
}

/// "protected by keys" for a stage on tcp; nothing for one that its socket file protects.
std::string protection_of(const StagePlan& stage, const PipelinePlan& plan) {
    const auto endpoint = transport::parse_endpoint(stage.endpoint);
    if (!endpoint.has_value() || endpoint->kind != transport::Endpoint::Kind::tcp) return "";
    if (!plan.keys.empty()) return "protected by keys";
    return endpoint->is_local() ? "without keys: every user of this box may use it"
                                : "without keys: everyone who reaches it may use it";
}

/// ": WHAT IT HOLDS; CORES; PROTECTION", whichever there are.
Result<std::string> facts_of(const StagePlan& stage, const PipelinePlan& plan, const Models& models,
                             const MachineCores& machine) {
    std::string facts;
    if (!stage.model.empty()) {
        ASSIGN_OR_RETURN(facts, holds_of(stage, models.at(stage.model)));
    }
    ASSIGN_OR_RETURN(const std::string cores, describe_cores(stage, machine));
    for (const std::string& fact : {cores, protection_of(stage, plan)}) {
        if (!facts.empty() && !fact.empty()) facts += "; ";
        facts += fact;
    }
    return facts.empty() ? facts : ": " + facts;
}

Status print_stages(const PipelinePlan& plan, const Models& models, const MachineCores& machine) {
    fmt::print("mkdir -p -m 700 {}\n", shell_line({plan.run_directory.string()}));
    for (const StagePlan& stage : plan.stages) {
        if (!stage.owned) {
            const std::string protection = protection_of(stage, plan);
            fmt::print("\n# {}: attached at {}, not started{}{}\n", stage.name, stage.endpoint,
                       protection.empty() ? "" : "; ", protection);
            continue;
        }
        std::vector<std::string> words;
        for (const auto& [name, value] : stage.env)
            words.push_back(fmt::format("{}={}", name, value));
        words.insert(words.end(), stage.argv.begin(), stage.argv.end());
        if (!stage.host.empty()) {
            fmt::print("\n# {}, on {}\n{}\n", stage.name, stage.host, shell_line(words));
            continue;
        }
        ASSIGN_OR_RETURN(const std::string facts, facts_of(stage, plan, models, machine));
        fmt::print("\n# {}{}\n{}\n", stage.name, facts, shell_line(words));
    }
    return Status::ok();
}

Speed given_rate(std::uint64_t bytes_per_s) {
    return {static_cast<double>(bytes_per_s), "as given"};
}

/// Directories of one model: a box may keep config and tokenizer apart from the weights.
bool same_config(const Models& models) {
    return !models.empty() && std::ranges::all_of(models, [&](const auto& entry) {
        return model::config_digest(entry.second.config) ==
               model::config_digest(models.begin()->second.config);
    });
}

Status print_time(const PlanCommand& command, const PipelinePlan& plan, const StageWeights& weights,
                  const PipelineMemory& memory, const Speed& memory_speed,
                  const experts::RoutingTrace& trace) {
    const model::Model& model = weights.models.begin()->second;
    const TokenReads reads = token_reads(model.config, memory);
    const bool is_simulated = !command.simulate.empty();
    Speed disk{0, ""};
    if (command.disk_rate > 0)
        disk = given_rate(command.disk_rate);
    else if (reads.disk_bytes() > 0 || (is_simulated && needs_disk_rate(plan)))
        disk = measure_disk(weights.files(), kDiskSeconds);
    fmt::print("\n{}", time_table(reads, memory_speed, disk));
    if (!is_simulated) return Status::ok();
    ASSIGN_OR_RETURN(const std::string tables,
                     simulation_tables(command, plan, model, memory, {memory_speed, disk}, trace));
    fmt::print("\n{}", tables);
    return Status::ok();
}

Status print_plan(const PlanCommand& command) {
    ASSIGN_OR_RETURN(std::filesystem::path config, config_or_default(command.config));
    ASSIGN_OR_RETURN(PipelineSpec spec, load_pipeline(config));
    if (!command.name.empty()) spec.name = command.name;
    experts::RoutingTrace trace;  // first: what cannot be simulated need not be planned
    if (!command.simulate.empty()) {
        ASSIGN_OR_RETURN(trace, experts::read_trace(command.simulate));
    }
    std::filesystem::path base = run_base(command.run_dir.empty() ? spec.run_dir : command.run_dir);
    RETURN_IF_ERROR(resolve_addresses(&spec));
    // Run id 0: a process started by hand belongs to no run.
    ASSIGN_OR_RETURN(const PipelinePlan plan, make_plan(spec, base / spec.name, 0));
    RETURN_IF_ERROR(check_settings(plan));
    const MachineCores machine = machine_cores();
    // First, while nothing else is in memory: its buffers and the index are not there together.
    const Speed speed = command.memory_rate > 0
                            ? given_rate(command.memory_rate)
                            : measure_memory(machine.allowed.size(), kMemoryBytes, kMemorySeconds);
    const PipelinePlan local = plan.on_this_box();
    ASSIGN_OR_RETURN(const StageWeights weights, open_weights(local));
    ASSIGN_OR_RETURN(const AvailableMemory available, available_memory());
    ASSIGN_OR_RETURN(const PipelineMemory memory,
                     plan_memory(local, weights, machine, available.bytes));

    fmt::print("pipeline '{}' of {}: {} to start, {} attached\n\n", plan.name, spec.file.string(),
               plan.n_owned(), plan.stages.size() - plan.n_owned());
    if (!plan.keys.empty()) fmt::print("{}\n\n", describe_keys(plan.keys));
    RETURN_IF_ERROR(print_stages(plan, weights.models, machine));
    for (const auto& [path, model] : weights.models) fmt::print("\n{}", model_table(model));
    if (!weights.packs.empty()) fmt::print("\npacks\n{}", pack_table(weights.packs));
    fmt::print("\n{}", memory_table(memory, available));
    if (plan.has_remote() && command.simulate.empty()) {
        fmt::print("  stages of other boxes are not counted: this is what the one at hand needs\n");
        return Status::ok();
    }
    if (same_config(weights.models)) {
        if (!plan.has_remote()) return print_time(command, plan, weights, memory, speed, trace);
        ASSIGN_OR_RETURN(const PipelineMemory everywhere,
                         plan_memory(plan.as_if_here(weights.models.begin()->first), weights,
                                     machine, available.bytes));
        return print_time(command, plan, weights, everywhere, speed, trace);
    }
    if (command.simulate.empty()) return Status::ok();
    return Error{ErrorCode::invalid_argument,
                 fmt::format("{} stages with {} models cannot be simulated", plan.stages.size(),
                             weights.models.size()),
                 "give all stages the same model"};
}

}  // namespace

int plan(const PlanCommand& command) {
    Status printed = print_plan(command);
    return printed.has_value() ? kExitOk : report(printed.error());
}

}  // namespace k3::launcher
