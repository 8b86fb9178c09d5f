#pragma once
// Forking, executing and reaping one child process, for the starters of stages and whoever else
// starts a program.

#include <optional>
#include <string>
#include <vector>

#include "common/base/fd.h"
#include "common/base/result.h"
#include "launcher/starter.h"

namespace k3::launcher {

struct Pipe {
    Fd read;
    Fd write;
};
/// Both ends are closed by an exec. Error: io.
Result<Pipe> make_pipe();

struct ChildSpec {
    std::string name;                    // for errors
    std::vector<std::string> argv;       // argv[0] is a path
    std::vector<std::string> variables;  // its whole environment: "NAME=value"
    int input = -1;                      // becomes its standard input; -1: /dev/null
    std::vector<int> inherited;          // kept open, under their numbers
    bool terminal = false;               // it keeps our terminal as 0, 1 and 2
};

/// The process leads a group of its own, with default signal handling and nothing blocked.
/// Errors: invalid_argument (not executable: path and reason), io (no processes or files left).
Result<Process> spawn_child(const ChildSpec& spec);

/// Our environment with `env` on top of it.
std::vector<std::string> environment_with(
    const std::vector<std::pair<std::string, std::string>>& env);

/// ProcessStarter::reap() for a child.
std::optional<Ending> reap_child(Process& process) noexcept;

}  // namespace k3::launcher
