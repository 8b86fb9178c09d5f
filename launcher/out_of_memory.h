#pragma once
// Whether the kernel has killed somebody of this box's cgroup for lack of memory.

#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

namespace k3::launcher {

class OutOfMemoryWatch {
  public:
    /// `root` is put before /proc and /sys (tests).
    explicit OutOfMemoryWatch(const std::filesystem::path& root = "/");
    /// True if there were more such kills than at the last look, in the cgroup of this process or
    /// below it. Never where the system does not count them.
    bool has_grown();
    /// For the sentence about one who was killed with SIGKILL when it had: what happened, how much
    /// there was, and what to do. " by the kernel, ...".
    std::string explain() const;

  private:
    std::uint64_t count() const;
    const std::filesystem::path root_;
    std::vector<std::filesystem::path> files_;  // with a line "oom_kill N"
    std::uint64_t seen_ = 0;
};

}  // namespace k3::launcher
