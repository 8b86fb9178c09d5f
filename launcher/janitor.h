#pragma once
// What cleans up when the launcher is killed with no chance to do so itself.
//
// Services end by themselves when their lifeline closes, but one that is stopped, hangs or was
// never ours to teach (a wrapper) does not. So a small process is forked before any thread exists.
// It learns every process group over a pipe; when the pipe ends without a farewell, the launcher is
// dead: it gives the services two seconds, kills what is left, and removes the run directory and
// the shared-memory segments of the run, and first of all runs a command that takes back what the
// launcher has taken elsewhere (a Slurm job). It holds the run directory's lock until then, so that
// a new pipeline of the same name cannot start into the cleaning.

#include <sys/types.h>

#include <cstdint>
#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include "common/base/fd.h"
#include "common/base/result.h"

namespace k3::launcher {

class Janitor {
  public:
    struct Options {
        std::filesystem::path run_directory;
        std::uint64_t run_id = 0;
        std::int64_t patience_ms = 2000;  // for services to end by themselves
        bool shared_run = false;  // others of the run live on here: only segments of the dead go
        // Run when the launcher is dead, and again when groups had to be killed; argv[0] a path.
        std::vector<std::string> last_command = {};
    };
    /// Forks. Must run while the process has one thread. Error: io.
    /// It keeps `lock_fd` (of the run directory) open, so the lock outlives us.
    static Result<std::unique_ptr<Janitor>> start(const Options& options, int lock_fd);
    /// Says farewell and waits for the process: the run ended in good order.
    ~Janitor();
    Janitor(const Janitor&) = delete;
    Janitor& operator=(const Janitor&) = delete;

    /// From now on `group` is killed if we die. One thread calls these.
    void watch(pid_t group) noexcept;
    void forget(pid_t group) noexcept;

  private:
    Janitor(pid_t pid, Fd pipe) : pid_(pid), pipe_(std::move(pipe)) {}
    void tell(char what, pid_t group) noexcept;
    pid_t pid_;
    Fd pipe_;
};

/// Removes the segments "/k3-<run id>-..." of a run; returns how many.
int remove_segments(std::uint64_t run_id) noexcept;

}  // namespace k3::launcher
