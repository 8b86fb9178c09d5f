#pragma once
// A short program from start to end: what it is told, what it says, how it ends.

#include <cstddef>
#include <string>
#include <string_view>
#include <vector>

#include "common/base/deadline.h"
#include "common/base/result.h"
#include "launcher/starter.h"

namespace k3::launcher {

struct ProgramRun {
    Ending ending;
    bool timed_out = false;  // it was killed at the deadline
    std::string output;      // stdout and stderr, the first kMaxProgramOutput bytes
};
inline constexpr std::size_t kMaxProgramOutput = std::size_t{1} << 20U;

/// Runs argv (argv[0] a path) in our environment with `input` as its standard input. Any thread.
/// Input that the program may not read to its end needs SIGPIPE ignored.
/// Errors: those of spawn_child(); cancelled, once `stop_fd` (-1: none) is readable.
Result<ProgramRun> run_program(const std::vector<std::string>& argv, std::string_view input,
                               Deadline deadline, int stop_fd = -1);

}  // namespace k3::launcher
