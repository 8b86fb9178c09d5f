#pragma once
// The run directory of one pipeline: its sockets, its lock, and the state that `status` reads.
//
//   <base>/<name>/lock         held with flock as long as the launcher or its janitor lives
//   <base>/<name>/state.json   what runs, replaced atomically at every change
//   <base>/<name>/<stage>.sock
//
// <base> is ${XDG_RUNTIME_DIR:-/tmp}/k3pipe-<uid>, mode 0700 and owned by the user: sockets are as
// private as their folder. Whoever gets the lock owns the name; a directory whose lock is free
// belongs to a dead run and is swept.

#include <cstdint>
#include <filesystem>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "common/base/fd.h"
#include "common/base/result.h"

namespace k3::launcher {

/// One stage in the state file.
struct StageRecord {
    std::string kind;
    std::string name;
    std::string endpoint;
    std::string host;    // where it runs; empty: here
    std::string client;  // by which program it was started there: "ssh", "srun"
    std::string state;   // stage_states.h, as text
    std::string detail;
    bool owned = true;
    std::int64_t pid = 0;  // of it, or of the client that holds it; 0: no process of ours now
    std::uint32_t restarts = 0;
};

struct RunRecord {
    std::string name;
    std::int64_t pid = 0;  // of the launcher
    std::string run_id;
    std::string file;
    std::string state;  // starting, ready, degraded, stopping
    std::int64_t started_unix_s = 0;
    std::string gateway;           // its endpoint
    std::string keys;              // path of its key file; empty: none
    std::string keys_fingerprint;  // of what was in it at the start
    std::vector<StageRecord> stages;
};

/// `given` if not empty, else ${XDG_RUNTIME_DIR:-/tmp}/k3pipe-<uid>.
std::filesystem::path run_base(const std::filesystem::path& given);

class RunDirectory {
  public:
    /// Makes <base>/<name> and takes its lock. What a dead run left there is removed; a run that
    /// died a moment ago is waited for while its janitor cleans up.
    /// Errors: resource_exhausted (the pipeline runs: its pid and the remedy), io (cannot be
    /// created or belongs to someone else).
    static Result<std::unique_ptr<RunDirectory>> acquire(const std::filesystem::path& base,
                                                         const std::string& name);
    /// Removes the directory, and the base if it is empty then.
    ~RunDirectory();
    RunDirectory(const RunDirectory&) = delete;
    RunDirectory& operator=(const RunDirectory&) = delete;

    const std::filesystem::path& path() const noexcept { return path_; }
    int lock_fd() const noexcept { return lock_.get(); }
    Status write(const RunRecord& record) const;

  private:
    RunDirectory(std::filesystem::path path, Fd lock)
        : path_(std::move(path)), lock_(std::move(lock)) {}
    std::filesystem::path path_;
    Fd lock_;
};

/// A run directory seen from outside.
struct FoundRun {
    RunRecord record;
    bool alive = false;  // its lock is held
};

/// Every run below `base` whose lock is held, by name.
std::vector<FoundRun> list_runs(const std::filesystem::path& base);
/// Nothing if no such pipeline runs. Error: io (the state file is damaged).
Result<std::optional<FoundRun>> find_run(const std::filesystem::path& base,
                                         const std::string& name);
/// Waits until nobody holds the lock of `name`; false at the end of `timeout_ms`.
bool wait_until_gone(const std::filesystem::path& base, const std::string& name,
                     std::int64_t timeout_ms);

/// Removes directories of dead runs below `base`; returns their names.
std::vector<std::string> sweep_dead_runs(const std::filesystem::path& base);

/// Removes a run directory's own files, the directory, and the base if that leaves it empty.
/// Used by the janitor too, so it neither throws nor logs.
void remove_run_directory(const std::filesystem::path& path) noexcept;

}  // namespace k3::launcher
