#pragma once
// Whether the kernel has killed somebody of this box's cgroup for lack of memory.

#include <cstdint>
#include <filesystem>
#include <vector>

namespace k3::launcher {

class OutOfMemoryWatch {
  public:
    /// `root` is put before /proc and /sys (tests).
    explicit OutOfMemoryWatch(const std::filesystem::path& root = "/");
    /// True if there were more such kills than at the last look, in the cgroup of this process or
    /// below it. Never where the system does not count them.
    bool has_grown();

  private:
    std::uint64_t count() const;
    std::vector<std::filesystem::path> files_;  // with a line "oom_kill N"
    std::uint64_t seen_ = 0;
};

}  // namespace k3::launcher
