#pragma once
// The headers of a checkpoint, one shard at a time: for whoever wants to have seen every tensor and
// keep none. Half a million names take 100 MB, and the index beside them 60 MB while it is parsed.

#include <cstddef>
#include <filesystem>
#include <functional>
#include <map>
#include <span>
#include <string>

#include "common/base/result.h"
#include "common/storage/safetensors.h"

namespace k3::storage {

/// One shard while it is looked at: nothing of it outlives the call.
struct ShardHeader {
    int fd = -1;  // open for reading
    const std::filesystem::path& path;
    std::span<const TensorInfo> tensors;  // in order of name, without those to skip
};

/// File names and the number of tensors in each.
using ListedFiles = std::map<std::string, std::size_t, std::less<>>;

/// Files that the index of `directory` names for tensors whose names begin with none of
/// `skip_prefixes`. Reads the index in pieces. Errors: not_found, io, corrupt.
Result<ListedFiles> shards_in_index(const std::filesystem::path& directory,
                                    std::span<const std::string> skip_prefixes);

/// What `error` of opening the shard `file` means, if it is not there: who names it, and for what.
Error missing_shard(Error error, const std::filesystem::path& index, const std::string& file,
                    std::size_t n_tensors);

/// Calls `visit` for each of these, in order of file name, until it returns an error. That the
/// index and the headers name the same tensors is for Checkpoint::open to find out.
/// Errors: those of shards_in_index, open_regular, read_safetensors_header and `visit`.
Status visit_shards(const std::filesystem::path& directory,
                    std::span<const std::string> skip_prefixes,
                    const std::function<Status(const ShardHeader& shard)>& visit);

}  // namespace k3::storage
