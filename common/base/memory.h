#pragma once
// How much memory this process may still take, and in which pages it lies.

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <span>
#include <string>
#include <vector>

#include "common/base/result.h"

namespace k3 {

struct AvailableMemory {
    std::uint64_t bytes = 0;
    std::string limited_by;  // for people: "/proc/meminfo" or the cgroup's file
};

/// The cgroup of this process that counts its memory.
struct MemoryCgroup {
    int version = 2;              // 1 or 2
    std::filesystem::path mount;  // of the hierarchy
    std::filesystem::path group;  // as /proc/self/cgroup names it; in a container perhaps unseen

    std::filesystem::path directory() const { return mount / group.relative_path(); }
};

/// One of either version: a machine may mount both, and only one of them has the files. `root` is
/// put before /proc and /sys (tests).
std::vector<MemoryCgroup> memory_cgroups(const std::filesystem::path& root = "/");

/// The smaller of what the machine has left (MemAvailable) and what the limits of this process's
/// cgroup and of its ancestors leave, page cache that can be given back counted as left. Versions 1
/// and 2 of cgroups; a cgroup that cannot be read does not limit.
/// Errors: io, corrupt (/proc/meminfo).
Result<AvailableMemory> available_memory(const std::filesystem::path& root = "/");

/// What all processes of this one's cgroup may take together: the smallest limit of the cgroup and
/// its ancestors, or all the memory that the machine has. Errors: as available_memory.
Result<AvailableMemory> memory_limit(const std::filesystem::path& root = "/");

/// Refuses a limit of this process's address space (RLIMIT_AS) below `least_bytes`: threads reserve
/// far more of it than they use, and libraries abort when one cannot be made.
/// Error: resource_exhausted, with both numbers.
Status check_address_space(std::uint64_t least_bytes);

/// Asks for huge pages in anonymous memory that nobody has touched yet: first touch is six times
/// faster so, and weights that are read once per token miss the TLB hundreds of times less. A
/// system that has none refuses, and only the speed differs.
void prefer_huge_pages(std::span<std::byte> memory) noexcept;

}  // namespace k3
