#pragma once
// Weights that the trunk reads again for every token, against what their disk gives.

#include <cstdint>
#include <filesystem>
#include <map>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <vector>

#include "common/base/result.h"
#include "common/storage/read_pool.h"
#include "launcher/run_directory.h"

namespace k3::bench {

using Counts = std::map<std::string, std::uint64_t>;  // "trunk.step_ns", summed over stages

/// The shape of the trunk's reads from its counters; nothing is streamed if it has no threads.
storage::ReadShape read_shape(const Counts& counts);

/// Bytes a second of the largest file of the checkpoint, read past the page cache with this shape
/// for two seconds; each call begins where the one before ended.
class DeviceRate {
  public:
    DeviceRate(std::filesystem::path model, const storage::ReadShape& shape)
        : model_(std::move(model)), shape_(shape) {}
    Result<double> measure();

  private:
    std::filesystem::path model_;
    storage::ReadShape shape_;
    std::uint64_t offset_ = 0;
};

/// The highest resident memory of every process of the pipeline so far, added up: what they share
/// counts once for each.
std::uint64_t peak_memory(const launcher::RunRecord& record);

/// One decode: what its counters say went by, in how many seconds, for how many tokens.
struct Streamed {
    Counts spent;
    storage::ReadShape shape;
    double wall_s = 0;
    std::uint64_t n_tokens = 0;
    std::vector<double> device_bytes_per_s;  // measured before and after
    std::uint64_t peak_bytes = 0;
    std::uint64_t token_bytes = 0;  // what the plan says
};
nlohmann::json report(const Streamed& streamed);

}  // namespace k3::bench
