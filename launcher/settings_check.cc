#include "launcher/settings_check.h"

#include <fmt/format.h>

#include <algorithm>
#include <filesystem>
#include <thread>
#include <vector>

#include "common/kernels/idle_threads.h"
#include "launcher/exit_verdict.h"
#include "launcher/run_program.h"
#include "launcher/service_output.h"

namespace k3::launcher {

namespace {

constexpr std::int64_t kCheckMs =
    20000;  // on a busy machine; what takes longer is left to the start

bool is_checked(const StagePlan& stage) {
    if (!stage.owned || stage.wrapped || !stage.host.empty()) return false;
    const std::filesystem::path program = stage.argv.front();
    return program.filename() == fmt::format("k3-{}", to_string(stage.kind));
}

/// Where a setting stands in the pipeline file is where it is corrected.
std::string place_of(const StagePlan& stage, const Ending& ending) {
    const bool settings = ending.exit_code() == kExitUsage && !stage.where.empty();
    return settings ? fmt::format("{}: {}", stage.where, stage.name) : stage.name;
}

Status check_stage(const StagePlan& stage, int stop_fd) {
    std::vector<std::string> words = {"/usr/bin/env"};
    // As the launcher starts it; without them the program would start itself once more.
    for (const auto& [name, value] : kernels::kIdleThreads)
        words.push_back(fmt::format("{}={}", name, value));
    for (const auto& [name, value] : stage.env) words.push_back(fmt::format("{}={}", name, value));
    words.insert(words.end(), stage.argv.begin(), stage.argv.end());
    words.emplace_back("--check");
    ASSIGN_OR_RETURN(const ProgramRun run,
                     run_program(words, Deadline::after_ms(kCheckMs), stop_fd));
    if (run.timed_out || run.ending.signalled || run.ending.number == kExitOk) return Status::ok();
    OutputReader reader;
    std::vector<OutputLine> lines = reader.add(run.output);
    for (OutputLine& line : reader.finish()) lines.push_back(std::move(line));
    const std::string reason =
        lines.empty() ? fmt::format("ended with {}", run.ending.text()) : lines.back().message;
    return Error{error_code_of(run.ending),
                 fmt::format("{}: {}", place_of(stage, run.ending), reason), ""};
}

}  // namespace

Status check_settings(const PipelinePlan& plan, int stop_fd) {
    std::vector<Status> found(plan.stages.size());
    std::vector<std::thread> threads;
    for (std::size_t i = 0; i < plan.stages.size(); ++i)
        if (is_checked(plan.stages[i]))
            threads.emplace_back([&, i] { found[i] = check_stage(plan.stages[i], stop_fd); });
    for (std::thread& thread : threads) thread.join();
    for (Status& status : found) RETURN_IF_ERROR(std::move(status));
    return Status::ok();
}

}  // namespace k3::launcher
