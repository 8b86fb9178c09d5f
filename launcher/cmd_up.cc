// `k3pipe up`, and what all verbs share.

#include <fmt/format.h>

#include "launcher/commands.h"
#include "launcher/paths.h"
#include "launcher/session.h"

namespace k3::launcher {

int report(const Error& error) {
    EventLog(EventLog::Detail::brief).important(error.sentence());
    return exit_code(error.code);
}

Result<std::filesystem::path> config_or_default(const std::filesystem::path& given) {
    if (!given.empty()) return given;
    ASSIGN_OR_RETURN(std::filesystem::path folder, configs_directory());
    return folder / "demo.toml";
}

Result<RunningPipeline> find_running(const std::filesystem::path& run_dir, const std::string& name,
                                     std::string_view naming) {
    std::filesystem::path base = run_base(run_dir);
    std::vector<FoundRun> runs;
    if (name.empty()) {
        runs = list_runs(base);
    } else {
        ASSIGN_OR_RETURN(std::optional<FoundRun> found, find_run(base, name));
        if (found.has_value()) runs.push_back(*std::move(found));
    }
    if (runs.empty())
        return Error{ErrorCode::unavailable,
                     name.empty()
                         ? fmt::format("no pipeline runs (looked in {})", base.string())
                         : fmt::format("no pipeline '{}' runs (looked in {})", name, base.string()),
                     "start one with `k3pipe up`, or give the --run-dir that it was started with"};
    if (runs.size() > 1) {
        std::string names;
        for (const FoundRun& run : runs) names += (names.empty() ? "" : ", ") + run.record.name;
        return Error{ErrorCode::invalid_argument,
                     fmt::format("{} pipelines run: {}", runs.size(), names),
                     fmt::format("name one of them: {}", naming)};
    }
    const RunRecord& record = runs.front().record;
    return RunningPipeline{record.name, record.gateway, record.keys, record.pid};
}

int up(const UpCommand& command) {
    EventLog events(command.verbose ? EventLog::Detail::verbose : EventLog::Detail::normal);
    auto config = config_or_default(command.config);
    if (!config.has_value()) return report(config.error());
    Session::Options options;
    options.config = *config;
    options.name = command.name;
    options.run_dir = command.run_dir;
    options.slurm = command.slurm;
    auto session = Session::open(options, events);
    if (!session.has_value()) {
        // Asked to stop while the other boxes were being asked: that is done.
        if (session.error().code != ErrorCode::cancelled) return report(session.error());
        events.normal("stopped before anything was started");
        return kExitOk;
    }
    Outcome outcome = (*session)->supervisor().run();
    session->reset();
    if (!outcome.status.has_value()) return report(outcome.status.error());
    events.normal("stopped");
    return kExitOk;
}

}  // namespace k3::launcher
