#pragma once
// A released checkpoint directory: model.safetensors.index.json and its shards.
//
// Opening reads the index and the headers, never weights. The index is the authority on which shard
// holds a tensor, the shard's header on where; a disagreement in either direction is an error at
// open. Tensors whose names begin with one of `skip_prefixes` (the vision tower) are ignored, and a
// shard that holds nothing else need not exist.
//
// The released checkpoint (96 shards, 497,220 tensors) opens in about a second: names and records
// lie in blocks, find() is one probe of a hash table.

#include <filesystem>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "common/base/result.h"
#include "common/storage/safetensors.h"

namespace k3::storage {

/// What makes a directory a checkpoint; the shards lie beside it.
inline constexpr std::string_view kIndexName = "model.safetensors.index.json";

/// How names of tensors begin that the text model does not have.
std::vector<std::string> vision_prefixes();

class Checkpoint {
  public:
    struct Options {
        std::filesystem::path directory;
        std::vector<std::string> skip_prefixes = vision_prefixes();
    };
    /// Errors: not_found (directory, index or a shard the index names), io (unreadable, errno),
    /// corrupt (index or header damaged; a tensor the index promises and the shard lacks, or the
    /// other way round; a tensor in two shards), incompatible (a dtype this build does not know).
    static Result<std::shared_ptr<const Checkpoint>> open(Options options);

    /// Null if there is none. Stays valid as long as the checkpoint.
    const TensorInfo* find(std::string_view name) const noexcept;

    /// The tensor with exactly this type and shape.
    /// Errors: not_found (naming tensor and directory), incompatible (both types or shapes named).
    Result<const TensorInfo*> require(std::string_view name, DType dtype,
                                      std::span<const std::uint64_t> shape) const;

    /// Reads the whole tensor; dst.size() must equal tensor.bytes. Any thread.
    /// Errors name file, tensor and offset: corrupt (the file has been truncated since), io.
    Status read(const TensorInfo& tensor, std::span<std::byte> dst) const;

    /// Reads any range of a shard, e.g. the run that holds one expert's six tensors. Any thread.
    /// Errors as read(), without the tensor's name.
    Status read_range(std::uint32_t shard, std::uint64_t offset, std::span<std::byte> dst) const;
    /// The same for bytes that lie together in the shard and apart in memory, in one system call:
    /// `parts` (at most kMaxParts of file.h) are filled one after the other. Any thread.
    Status read_range(std::uint32_t shard, std::uint64_t offset,
                      std::span<const std::span<std::byte>> parts) const;

    /// In order of name. Text tensors only.
    std::span<const TensorInfo> tensors() const noexcept;
    const std::filesystem::path& directory() const noexcept;
    std::uint32_t n_shards() const noexcept;  // those that hold text tensors
    const std::filesystem::path& shard_path(std::uint32_t shard) const noexcept;

    ~Checkpoint();
    Checkpoint(const Checkpoint&) = delete;
    Checkpoint& operator=(const Checkpoint&) = delete;

  private:
    class Impl;
    explicit Checkpoint(std::unique_ptr<Impl> impl);
    std::unique_ptr<Impl> impl_;
};

}  // namespace k3::storage
