#pragma once
// A limit on what a process reads from a disk, set by the kernel: several processes on one disk
// then read as if each had a slower one of its own.

#include <sys/types.h>

#include <cstdint>
#include <filesystem>
#include <memory>
#include <string>
#include <utility>

#include "common/base/result.h"

namespace k3::bench {

/// A blkio cgroup (version 1), which needs root.
class DiskLimit {
  public:
    /// For reads from the disk on which `path` lies. `name` is part of the group's.
    /// Error: io (no such group can be made here).
    static Result<std::unique_ptr<DiskLimit>> create(const std::filesystem::path& path,
                                                     std::uint64_t bytes_per_s,
                                                     const std::string& name);
    /// Its processes have ended.
    ~DiskLimit();
    DiskLimit(const DiskLimit&) = delete;
    DiskLimit& operator=(const DiskLimit&) = delete;

    /// Error: io.
    Status add(pid_t process) const;

  private:
    explicit DiskLimit(std::filesystem::path directory) : directory_(std::move(directory)) {}

    std::filesystem::path directory_;
};

}  // namespace k3::bench
