#pragma once
// A limit of memory around processes: what a budget is worth shows only where the kernel ends
// whoever takes more.

#include <cstdint>
#include <filesystem>
#include <memory>
#include <utility>

#include "common/base/result.h"

namespace k3::bench {

/// A memory cgroup below our own (version 1 or 2), which needs root or a delegated hierarchy.
class MemoryCap {
  public:
    /// Whoever is in the group may take `bytes` together. Error: io (no such group can be made).
    static Result<std::unique_ptr<MemoryCap>> create(std::uint64_t bytes);
    /// Those who are still in it go on without the limit.
    ~MemoryCap();
    MemoryCap(const MemoryCap&) = delete;
    MemoryCap& operator=(const MemoryCap&) = delete;

    /// Moves this process in, with all that it starts until it leaves. Error: io.
    Status enter() const;
    Status leave() const;

    /// The most that was taken at a time, page cache included; 0 where the kernel does not say.
    std::uint64_t peak_bytes() const;
    /// How many processes the kernel ended for want of memory.
    std::uint64_t n_killed() const;

  private:
    MemoryCap(int version, std::filesystem::path parent, std::filesystem::path directory)
        : version_(version), parent_(std::move(parent)), directory_(std::move(directory)) {}

    int version_;
    std::filesystem::path parent_;
    std::filesystem::path directory_;
};

}  // namespace k3::bench
