#pragma once
// A checkpoint of random weights in the released layout: the released dimensions of a layer, with
// fewer layers, experts and vocabulary rows. For benchmarks and for tests of what needs
// released-size shards; what it generates means nothing.

#include <cstdint>
#include <filesystem>
#include <functional>
#include <string>
#include <vector>

#include "common/base/result.h"
#include "common/model/tensor_names.h"

namespace k3::model {

struct SyntheticOptions {
    std::uint32_t n_layers = 5;
    std::uint32_t n_experts = 64;
    std::uint32_t vocab_size = 4096;
    std::uint64_t seed = 1;
    /// Data are left out: every file has its real header and size and takes next to no room, and
    /// every weight reads as zero. Vision tensors are there as released, and tensors lie in the
    /// released order, so that at full size (kReleasedSize) each file has the released size.
    bool sparse = false;
};

/// 96 shards, 497,220 tensors, 1.56 TB. Spec section 2.1.
inline constexpr SyntheticOptions kReleasedSize{93, 896, 163840, 1, true};

struct SyntheticShard {
    std::string file;  // "model-00001-of-000006.safetensors"
    std::vector<TensorSpec> tensors;
    std::uint64_t bytes = 0;  // payload
};

struct SyntheticPlan {
    SyntheticOptions options;
    ModelConfig config;
    std::string config_json;
    std::vector<SyntheticShard>
        shards;               // one a layer, one for what belongs to none; sparse: vision
    std::uint64_t bytes = 0;  // payload of all shards
    std::uint64_t n_tensors = 0;
    std::uint64_t bytes_per_token = 0;  // of a decode step: the trunk and top_k experts a layer
};

/// Layer kinds as released: every fourth layer MLA, the last of 93 too.
/// Errors: invalid_argument (fewer layers, experts or vocabulary rows than the architecture needs,
/// or more than were released; both numbers).
Result<SyntheticPlan> plan_synthetic(const SyntheticOptions& options);

/// Writes the files into `directory`, which must not exist yet, while its parent must: it appears
/// when all is written. An attempt that fails leaves nothing, and one that was killed leaves
/// `directory`.partial, which the next one takes over. Every byte is a function of options alone,
/// tensor by tensor (from its name and the seed). `progress(done, total)` is called every few
/// megabytes (sparse: after every shard); false stops. Errors: io, resource_exhausted (disk space,
/// both numbers, before anything is written; no parent; written by another process; a sparse file
/// is too large for the file system), unsupported (the file system has no sparse files),
/// invalid_argument (the directory exists), cancelled.
Status write_synthetic(const SyntheticPlan& plan, const std::filesystem::path& directory,
                       const std::function<bool(std::uint64_t, std::uint64_t)>& progress);

}  // namespace k3::model
