#pragma once
// Starting, signalling and reaping one process. Behind an interface, because a stage of another box
// is started over ssh or by Slurm (host_starter.h).

#include <sys/types.h>

#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "common/base/fd.h"
#include "common/base/result.h"

namespace k3::launcher {

struct Command {
    std::string name;                                      // of the stage, for errors
    std::vector<std::string> argv;                         // argv[0] is a path, if it runs here
    std::vector<std::pair<std::string, std::string>> env;  // on top of ours
    bool terminal = false;            // it gets our terminal instead of /dev/null and a pipe
    std::string host = {};            // where it is started; empty: this box
    std::size_t n_wrap = 0;           // words of argv in front of the program, for another box
    bool own_sessions = false;        // it is told where sessions are kept on its box
    bool with_keys = false;           // its box is handed the pipeline's keys
    std::vector<int> inherited = {};  // descriptors that it gets under their numbers, here
};

/// How a process ended.
struct Ending {
    bool signalled = false;
    int number = 0;            // exit code or signal
    std::string text() const;  // "exit code 3", "signal 9 (Killed)"
    int exit_code() const noexcept { return signalled ? -1 : number; }
};

/// A running process, leader of its own group. Move-only by its descriptors.
struct Process {
    pid_t pid = -1;
    Fd exited;  // becomes readable when it ends
    Fd output;  // its stdout and stderr, non-blocking; invalid with a terminal
};

class ProcessStarter {
  public:
    virtual ~ProcessStarter() = default;
    /// Errors: invalid_argument (not executable: path and reason), io (no processes or files left).
    virtual Result<Process> start(const Command& command) = 0;
    /// To the whole group; harmless if it is gone.
    virtual void signal(const Process& process, int number) noexcept = 0;
    /// Continues those of the group that are stopped (SIGSTOP, Ctrl-Z) and no others: SIGCONT also
    /// discards a SIGSTOP under way, with which a tracer takes hold of a running process (a
    /// debugger; LeakSanitizer at exit), and the tracer would then wait for it forever.
    virtual void resume(const Process& process) noexcept = 0;
    /// The ending of a process whose `exited` is readable. What is left of its group is killed
    /// before its id becomes free. Nothing if it still runs.
    virtual std::optional<Ending> reap(Process& process) noexcept = 0;
    /// Why nothing can be started on that host (empty: here) any more; nothing, if it can or that
    /// is not known. For whenever a process has ended there; may take some seconds.
    virtual std::optional<Error> lost(const std::string& /*host*/) { return std::nullopt; }
};

/// Children of this process, in our environment and the command's, with the variables of
/// common/kernels/idle_threads.h unless either says how idle compute threads should wait. All of
/// them inherit one lifeline: the reading end of a pipe that only we write, passed as
/// `--lifeline-fd N`; its end of file tells them that we died. What a command says for another box
/// is ignored. Error: io.
Result<std::unique_ptr<ProcessStarter>> make_local_starter();

}  // namespace k3::launcher
