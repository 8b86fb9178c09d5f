#pragma once
// A short program from start to end: what it is told, what it says, how it ends.

#include <cstddef>
#include <string>
#include <vector>

#include "common/base/deadline.h"
#include "common/base/fd.h"
#include "common/base/result.h"
#include "launcher/starter.h"

namespace k3::launcher {

struct ProgramRun {
    Ending ending;
    bool timed_out = false;  // it was killed at the deadline
    std::string output;      // stdout and stderr, the first kMaxProgramOutput bytes
};
inline constexpr std::size_t kMaxProgramOutput = std::size_t{1} << 20U;

/// Runs argv (argv[0] a path) in our environment. Its standard input are these files, from where
/// they stand, one after another; SIGPIPE must be ignored if there are any. Any thread.
/// Errors: those of spawn_child(); cancelled, once `stop_fd` (-1: none) is readable.
Result<ProgramRun> run_program(const std::vector<std::string>& argv, Deadline deadline,
                               int stop_fd = -1, const std::vector<Fd>& input = {});

}  // namespace k3::launcher
