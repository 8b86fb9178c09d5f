#include "launcher/stage_cores.h"

#include <fmt/format.h>

namespace k3::launcher {

namespace {

/// Empty if it was not given.
std::string value_of(const StagePlan& stage, std::string_view name) {
    for (const ServiceSetting& setting : stage.settings)
        if (setting.name == name && !setting.values.empty()) return setting.values.back();
    return {};
}

std::string in_table_of(const StagePlan& stage) {
    return stage.where.empty() ? stage.name : fmt::format("{}: {}", stage.where, stage.name);
}

/// The stage's, or all that it gets from us; none if that is the wrapper's decision.
Result<CoreSet> core_set(const StagePlan& stage, const std::string& text,
                         const MachineCores& machine) {
    if (text.empty()) return stage.wrapped ? CoreSet() : machine.allowed;
    auto cores = parse_cores(text);
    if (!cores.has_value()) return std::move(cores).error().with_context(in_table_of(stage));
    if (stage.wrapped) return cores;
    Status known = check_cores(*cores, machine);
    if (!known.has_value()) return std::move(known).error().with_context(in_table_of(stage));
    return cores;
}

}  // namespace

Result<std::string> describe_cores(const StagePlan& stage, const MachineCores& machine) {
    const std::string text = value_of(stage, "cores");
    ASSIGN_OR_RETURN(const CoreSet cores, core_set(stage, text, machine));
    const std::string where =
        fmt::format("core{} {}", cores.size() == 1 ? "" : "s", format_cores(cores));
    const bool computes =
        stage.kind == msg::ServiceKind::trunk || stage.kind == msg::ServiceKind::experts;
    if (!computes) return text.empty() ? std::string() : where;
    std::string threads = value_of(stage, "threads");
    if (threads.empty() || threads == "0")
        threads = cores.empty() ? "as many" : std::to_string(cores.size());
    return fmt::format("{} thread{} on {}", threads, threads == "1" ? "" : "s",
                       cores.empty() ? "the cores that its wrapper leaves" : where);
}

}  // namespace k3::launcher
