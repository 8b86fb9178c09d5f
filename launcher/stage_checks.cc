#include "launcher/stage_checks.h"

#include <fmt/format.h>

#include <chrono>

namespace k3::launcher {

using std::chrono::milliseconds;

std::optional<Error> check_announcement(const SupervisedStage& stage,
                                        const msg::Announcement& announcement,
                                        const std::vector<SupervisedStage>& all) {
    if (announcement.kind != stage.plan.kind)
        return Error{ErrorCode::incompatible,
                     fmt::format("{} answers for [{}] and is a {} (called {})", stage.plan.endpoint,
                                 msg::to_string(stage.plan.kind), msg::to_string(announcement.kind),
                                 announcement.name),
                     "correct the endpoint or binary in the pipeline file"};
    for (const SupervisedStage& other : all) {
        if (&other == &stage || other.fingerprint.empty() || announcement.fingerprint.empty() ||
            other.fingerprint == announcement.fingerprint)
            continue;
        return Error{ErrorCode::incompatible,
                     fmt::format("{} and {} serve different checkpoints (fingerprints {} and {})",
                                 stage.plan.name, other.plan.name, announcement.fingerprint,
                                 other.fingerprint),
                     "give every stage the same model"};
    }
    return std::nullopt;
}

std::optional<Error> check_start(const SupervisedStage& stage, const SupervisorOptions& options,
                                 Clock::time_point now) {
    const auto waited = now - stage.progress_at;
    if (stage.state == StageState::starting && !stage.plan.owned &&
        waited > milliseconds(options.attach_timeout_ms))
        return Error{ErrorCode::unavailable,
                     fmt::format("nothing answers at {}, the endpoint of {}, within {} ms",
                                 stage.plan.endpoint, stage.plan.name, options.attach_timeout_ms),
                     "start that process first, or remove the endpoint from the pipeline file"};
    const bool coming = stage.state == StageState::starting || stage.state == StageState::loading;
    if (!coming || stage.plan.terminal || waited <= milliseconds(options.start_timeout_ms))
        return std::nullopt;
    return Error{ErrorCode::deadline_exceeded,
                 fmt::format("{} is not ready and made no progress for {} s ({} at {}.{} %{}{})",
                             stage.plan.name, options.start_timeout_ms / 1000,
                             to_string(stage.state), stage.permille / 10, stage.permille % 10,
                             stage.detail.empty() ? "" : ": ", stage.detail),
                 "raise start_timeout_s in [pipeline], or look at its log with -v"};
}

}  // namespace k3::launcher
