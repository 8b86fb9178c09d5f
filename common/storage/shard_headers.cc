#include "common/storage/shard_headers.h"

#include <fmt/format.h>

#include <algorithm>
#include <vector>

#include "common/storage/checkpoint.h"

namespace k3::storage {

namespace {

constexpr std::size_t kChunkBytes = std::size_t{256} << 10U;
constexpr std::size_t kMostTextBytes = 4096;

/// Finds the pairs of strings in the object "weight_map" of a JSON object, which comes in pieces.
/// Everything else is only looked at as far as strings and braces go: a file that is no JSON at all
/// is found by whoever parses it.
class WeightMapScanner {
  public:
    using Visit = std::function<Status(const std::string& name, const std::string& file)>;

    explicit WeightMapScanner(Visit visit) : visit_(std::move(visit)) {}

    /// Errors: those of `visit`, corrupt (without the file's name).
    Status scan(std::string_view text) {
        for (const char c : text) {
            if (is_in_string_) {
                if (c == '"')
                    RETURN_IF_ERROR(end_string());
                else if (c == '\\' || text_.size() == kMostTextBytes)
                    return broken("a string with an escape, or of more than 4096 bytes");
                else
                    text_ += c;
                continue;
            }
            switch (c) {
                case '"':
                    is_in_string_ = true;
                    text_.clear();
                    break;
                case ':':
                    key_ = text_;
                    is_value_ = true;
                    break;
                case ',':
                    is_value_ = false;
                    break;
                case '{':
                    ++depth_;
                    if (depth_ == 2) is_in_map_ = is_value_ && key_ == "weight_map";
                    has_map_ = has_map_ || is_in_map_;
                    is_value_ = false;
                    break;
                case '}':
                    --depth_;
                    is_value_ = false;
                    break;
                default:
                    break;
            }
        }
        return Status::ok();
    }

    /// Error: corrupt, if the file cannot be at its end here.
    Status finish() const {
        if (depth_ == 0 && !is_in_string_ && has_map_) return Status::ok();
        return broken("no whole object with a weight_map");
    }

  private:
    static Error broken(std::string_view what) {
        return Error{ErrorCode::corrupt, fmt::format("not an index of tensors: {}", what),
                     "copy the index and the shards again from the same release"};
    }

    Status end_string() {
        is_in_string_ = false;
        if (depth_ != 2 || !is_in_map_ || !is_value_) return Status::ok();
        is_value_ = false;
        return visit_(key_, text_);
    }

    const Visit visit_;
    std::string text_;
    std::string key_;
    int depth_ = 0;
    bool is_in_string_ = false;
    bool is_value_ = false;   // behind a colon
    bool is_in_map_ = false;  // the last object of depth 2
    bool has_map_ = false;
};

}  // namespace

Result<std::set<std::string>> shards_in_index(const std::filesystem::path& directory,
                                              std::span<const std::string> skip_prefixes) {
    RETURN_IF_ERROR(check_checkpoint_directory(directory));
    const std::filesystem::path path = directory / kIndexName;
    ASSIGN_OR_RETURN(const OpenFile file, open_regular(path));
    std::set<std::string> shards;
    WeightMapScanner scanner([&](const std::string& name, const std::string& shard) -> Status {
        if (has_prefix(name, skip_prefixes)) return Status::ok();
        if (shard.empty() || shard.find('/') != std::string::npos || shard == "..")
            return Error{ErrorCode::corrupt,
                         fmt::format("'{}', named for tensor {}, is not the name of a file beside "
                                     "the index",
                                     shard, name),
                         "copy the index and the shards again from the same release"};
        shards.insert(shard);
        return Status::ok();
    });
    std::vector<char> chunk(kChunkBytes);
    for (std::uint64_t at = 0; at < file.bytes; at += kChunkBytes) {
        const std::span<char> part(chunk.data(),
                                   std::min<std::uint64_t>(kChunkBytes, file.bytes - at));
        RETURN_IF_ERROR(read_exactly(file.fd.get(), at, std::as_writable_bytes(part), path));
        Status scanned = scanner.scan({part.data(), part.size()});
        if (!scanned.has_value()) return std::move(scanned).error().with_context(path.string());
    }
    if (Status ended = scanner.finish(); !ended.has_value())
        return std::move(ended).error().with_context(path.string());
    return shards;
}

Status visit_shards(const std::filesystem::path& directory,
                    std::span<const std::string> skip_prefixes,
                    const std::function<Status(const ShardHeader& shard)>& visit) {
    ASSIGN_OR_RETURN(const std::set<std::string> shards, shards_in_index(directory, skip_prefixes));
    for (const std::string& shard : shards) {
        const std::filesystem::path path = directory / shard;
        ASSIGN_OR_RETURN(const OpenFile file, open_regular(path));
        NamePool names;
        ASSIGN_OR_RETURN(
            const std::vector<TensorInfo> tensors,
            read_safetensors_header(file.fd.get(), file.bytes, path, names, skip_prefixes));
        RETURN_IF_ERROR(visit({file.fd.get(), path, tensors}));
    }
    return Status::ok();
}

}  // namespace k3::storage
