#pragma once
// The Slurm job that a pipeline's other boxes belong to: the one in which we run, or one of our own.
//
// One of our own is made by `salloc --no-shell` under a name that only this run has, so that it can be
// cancelled whether or not its number is known: by us at the end, by the janitor if we are killed
// (cancel_words()).

#include <cstddef>
#include <filesystem>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "common/base/result.h"
#include "launcher/child.h"
#include "launcher/events.h"
#include "launcher/janitor.h"
#include "launcher/pipeline_file.h"
#include "launcher/remote.h"

namespace k3::launcher {

struct SlurmNode {
    std::string name;
    std::string address;  // as Slurm's settings have it: a name or digits
};

class SlurmAllocation {
  public:
    struct Request {
        SlurmSpec spec;
        std::string job_name;        // unique, of a job of our own
        std::size_t n_nodes = 0;     // of a job of our own
        std::filesystem::path file;  // that holds [slurm], for errors
    };
    /// Takes the job that SLURM_JOB_ID names, or else asks for one and waits until it has its
    /// nodes, as long as it takes; says on what it waits to `events`, and gives up when `stop_fd`
    /// (of StopSignals) becomes readable. Afterwards no SLURM_... variable but those that say which
    /// cluster is meant is left in our environment: they would change what srun does. Must run
    /// while the process has one thread. `janitor` must know cancel_words() of the job's name.
    /// Errors: unavailable (no Slurm here, no answer, the job ended or has no nodes),
    /// invalid_argument (Slurm refuses what [slurm] asks for; the job is smaller than it asks for),
    /// cancelled.
    static Result<std::unique_ptr<SlurmAllocation>> open(const Request& request,
                                                         Janitor& janitor, const EventLog& events,
                                                         int stop_fd);
    /// Gives back a job of our own. Takes some seconds if Slurm does not answer.
    ~SlurmAllocation();
    SlurmAllocation(const SlurmAllocation&) = delete;
    SlurmAllocation& operator=(const SlurmAllocation&) = delete;

    const std::string& job() const noexcept { return job_; }
    const std::vector<SlurmNode>& nodes() const noexcept { return nodes_; }

  private:
    SlurmAllocation() = default;
    Status take(const Request& request, Janitor& janitor, const EventLog& events, int stop_fd);
    Status wait_for_grant(const EventLog& events, int stop_fd);
    Status find_nodes(const Request& request);

    std::string job_;
    std::string job_name_;  // empty: the job is not ours
    std::vector<SlurmNode> nodes_;
    Process asking_;  // salloc, until the job has its nodes
};

/// Whether we run in a job that we were not the ones to make.
bool is_in_slurm_job() noexcept;

/// The command that cancels a job of our own. Error: unavailable.
Result<std::vector<std::string>> cancel_words(const std::string& job_name);

/// What salloc is asked for.
std::vector<std::string> allocation_words(const SlurmAllocation::Request& request);

/// The value of `key` in a line of `scontrol show -o`; empty if it has none.
std::string field_of(std::string_view line, std::string_view key);

/// Why a job is of no use any more, from what `scontrol show job` prints of it; nothing: it runs.
std::optional<Error> end_of_job(const std::string& job, std::string_view shown);

/// What Slurm's program says is wrong: its last line with an error, or else its last line, without
/// what stands in front.
std::string slurm_complaint(std::string_view output);

/// One of Slurm's client programs, as a path. Error: unavailable.
Result<std::string> slurm_program(const std::string& name);

}  // namespace k3::launcher
