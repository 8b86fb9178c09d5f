#include "launcher/exit_verdict.h"

#include <algorithm>

namespace k3::launcher {

Verdict judge_exit(const ExitFacts& facts) noexcept {
    if (!facts.ending.signalled) {
        int code = facts.ending.number;
        if (code == kExitUsage || code == kExitModel || code == 126 || code == 127)
            return Verdict::give_up;
        if (!facts.was_ready && (code == kExitOk || code == kExitResources))
            return Verdict::give_up;
    }
    if (facts.policy == RestartPolicy::never) return Verdict::give_up;
    return facts.recent_restarts < facts.max_restarts ? Verdict::restart : Verdict::give_up;
}

std::int64_t back_off_ms(std::size_t recent_restarts) noexcept {
    std::int64_t pause = 100LL << std::min<std::size_t>(recent_restarts, 6);
    return std::min<std::int64_t>(pause, 5000);
}

ErrorCode error_code_of(const Ending& ending) noexcept {
    if (ending.signalled) return ErrorCode::internal;
    switch (ending.number) {
        case kExitUsage:
        case 126:
        case 127:
            return ErrorCode::invalid_argument;
        case kExitModel:
            return ErrorCode::incompatible;
        case kExitResources:
            return ErrorCode::resource_exhausted;
        case kExitUnavailable:
            return ErrorCode::unavailable;
        default:
            return ErrorCode::internal;
    }
}

}  // namespace k3::launcher
