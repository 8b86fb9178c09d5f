#pragma once
// What a service's way of ending means: try again, or give up.

#include <cstddef>
#include <cstdint>

#include "common/base/error.h"
#include "launcher/pipeline_file.h"
#include "launcher/starter.h"

namespace k3::launcher {

/// What to do after a process ended without being asked.
enum class Verdict { restart, give_up };
struct ExitFacts {
    Ending ending;
    bool was_ready = false;           // this process had been ready
    std::size_t recent_restarts = 0;  // of the stage, within the window
    std::size_t max_restarts = 0;
    RestartPolicy policy = RestartPolicy::on_failure;
};
/// Bad settings (2) and a bad model (3) are given up at once, and so is what ends by itself before
/// it was ever ready with an answer that will not change (0, in use 4, not executable 126, 127).
Verdict judge_exit(const ExitFacts& facts) noexcept;
/// Pause before the next start: 100 ms, doubled for each recent restart, at most 5 s.
std::int64_t back_off_ms(std::size_t recent_restarts) noexcept;

/// The code that makes our exit code the one of the child.
ErrorCode error_code_of(const Ending& ending) noexcept;

}  // namespace k3::launcher
