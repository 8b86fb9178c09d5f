#pragma once
// How fast this machine reads memory and the checkpoint's disk; short measurements for `k3pipe
// plan` and `k3pipe doctor`. Nothing is written.

#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

namespace k3::launcher {

struct Speed {
    double bytes_per_s = 0;  // 0: not measured
    std::string how;         // for people: "measured: 4 threads, direct reads of 4 MiB", or why not
};

/// Reads of memory by `n_threads`, which share `n_bytes`: more than caches hold.
Speed measure_memory(std::size_t n_threads, std::size_t n_bytes, double seconds);

/// Reads of the largest of `files` in the way of the engine (common/storage/read_probe.h), past the
/// page cache where the file system allows it. Files with holes say nothing about a disk, and
/// neither do small ones.
Speed measure_disk(const std::vector<std::filesystem::path>& files, double seconds);

}  // namespace k3::launcher
