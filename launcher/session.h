#pragma once
// Everything that a running pipeline of ours needs around the supervisor: the run directory, the
// janitor, the stop signals, the state file. Shared by `up` and `run`.

#include <filesystem>
#include <memory>
#include <string>

#include "common/base/result.h"
#include "common/transport/curve_keys.h"
#include "launcher/events.h"
#include "launcher/janitor.h"
#include "launcher/pipeline_file.h"
#include "launcher/run_directory.h"
#include "launcher/slurm_allocation.h"
#include "launcher/starter.h"
#include "launcher/stop_signals.h"
#include "launcher/supervisor.h"

namespace k3::launcher {

class Session {
  public:
    struct Options {
        std::filesystem::path config;
        std::filesystem::path run_dir;  // from the command line; empty: as the file says
        std::string name;               // empty: as the file says
        bool unique_name = false;       // "<name>-<pid>": a pipeline of its own for one request
        bool forward_errors = true;
        bool slurm = false;  // expert servers and trunk stages run in a Slurm job
        // Where the trunk stages that are started here keep saved sessions; empty: as the file
        // says.
        std::filesystem::path session_dir;
    };
    /// Reads the file, plans, takes the run directory, forks the janitor, waits for a Slurm job if
    /// one is meant. Starts no stage.
    /// Must run while the process has one thread. `events` is borrowed.
    static Result<std::unique_ptr<Session>> open(const Options& options, const EventLog& events);
    ~Session();
    Session(const Session&) = delete;
    Session& operator=(const Session&) = delete;

    Supervisor& supervisor() noexcept { return *supervisor_; }
    const std::string& gateway() const noexcept { return record_.gateway; }
    const std::string& name() const noexcept { return record_.name; }
    std::uint64_t run_id() const noexcept { return run_id_; }
    /// Null: its pipeline has none. Shared with the watchers.
    const std::shared_ptr<const transport::CurveKeys>& keys() const noexcept { return keys_; }

  private:
    Session() = default;
    Status open_parts(const Options& options, PipelineSpec spec, const EventLog& events);
    std::string job_name() const;  // of a Slurm job of our own
    Status allocate(PipelineSpec* spec, std::size_t n_nodes, const EventLog& events);
    Result<std::shared_ptr<Remote>> make_remote(const PipelineSpec& spec) const;
    void announce(const PipelinePlan& plan, const EventLog& events) const;

    // In the order of making; unmade backwards, the directory and its janitor last.
    std::uint64_t run_id_ = 0;
    std::unique_ptr<RunDirectory> directory_;
    std::unique_ptr<Janitor> janitor_;
    StopSignals signals_;
    std::unique_ptr<SlurmAllocation> allocation_;
    std::unique_ptr<ProcessStarter> starter_;
    RunRecord record_;
    std::shared_ptr<const transport::CurveKeys> keys_;
    std::unique_ptr<Supervisor> supervisor_;
};

/// Stacks and heaps of some twenty threads: those of ZeroMQ, and of the supervisor.
inline constexpr std::uint64_t kLauncherAddressSpace = std::uint64_t{4} << 30U;

/// Random, with 16 hex digits.
std::uint64_t new_run_id();

}  // namespace k3::launcher
