#include "common/storage/shard_headers.h"

#include <fmt/format.h>

#include <cerrno>
#include <fstream>
#include <nlohmann/json.hpp>
#include <optional>
#include <utility>
#include <vector>

#include "common/storage/checkpoint.h"

namespace k3::storage {

namespace {

using nlohmann::json;

Error bad_index(const std::filesystem::path& index, const std::string& what) {
    return Error{ErrorCode::corrupt, fmt::format("{}: {}", index.string(), what),
                 "copy the index and the shards again from the same release"};
}

/// Takes the pairs of strings in the object "weight_map" of the index, and keeps the files.
/// simdjson, which reads the index for Checkpoint, wants the whole text in memory.
class WeightMap final : public json::json_sax_t {
  public:
    WeightMap(const std::filesystem::path& index, std::span<const std::string> skip_prefixes)
        : index_(index), skip_prefixes_(skip_prefixes) {}

    /// Tensors of each file. Error: corrupt (no weight_map, a name that is no file beside it).
    Result<ListedFiles> take() {
        if (problem_) return *std::move(problem_);
        if (!has_map_) return bad_index(index_, "not an index of tensors: it has no weight_map");
        return std::move(files_);
    }

    bool null() override { return other(); }
    bool boolean(bool) override { return other(); }
    bool number_integer(number_integer_t) override { return other(); }
    bool number_unsigned(number_unsigned_t) override { return other(); }
    bool number_float(number_float_t, const string_t&) override { return other(); }
    bool binary(binary_t&) override { return other(); }
    bool string(string_t& file) override {
        if (!is_in_map()) return true;
        if (has_prefix(key_, skip_prefixes_)) return true;
        if (file.empty() || file.find('/') != std::string::npos || file == "..")
            return fail(
                fmt::format("'{}', named for tensor {}, is not the name of a file beside the index",
                            file, key_));
        ++files_[file];
        return true;
    }
    bool key(string_t& name) override {
        if (depth_ == 1) is_map_next_ = name == "weight_map";
        key_ = name;
        return true;
    }
    bool start_object(std::size_t) override {
        if (depth_ == 1 && is_map_next_) has_map_ = true;
        ++depth_;
        return true;
    }
    bool end_object() override {
        --depth_;
        return true;
    }
    bool start_array(std::size_t) override {
        if (is_in_map()) return other();
        ++depth_;
        return true;
    }
    bool end_array() override {
        --depth_;
        return true;
    }
    bool parse_error(std::size_t, const std::string&, const json::exception& error) override {
        return fail(fmt::format("not an index of tensors: {}", error.what()));
    }

  private:
    bool is_in_map() const noexcept { return depth_ == 2 && is_map_next_ && has_map_; }
    bool other() {
        return !is_in_map() || fail(fmt::format("what it names for tensor {} is not a file", key_));
    }
    bool fail(const std::string& what) {
        problem_ = bad_index(index_, what);
        return false;
    }

    const std::filesystem::path& index_;
    const std::span<const std::string> skip_prefixes_;
    ListedFiles files_;
    std::string key_;
    int depth_ = 0;
    bool is_map_next_ = false;  // the key of depth 1 that was read last
    bool has_map_ = false;
    std::optional<Error> problem_;
};

}  // namespace

Error missing_shard(Error error, const std::filesystem::path& index, const std::string& file,
                    std::size_t n_tensors) {
    if (error.code != ErrorCode::not_found) return error;
    return Error{ErrorCode::not_found,
                 fmt::format("{} names {} tensors in {}, and there is no such file", index.string(),
                             n_tensors, file),
                 fmt::format("copy {} into {}", file, index.parent_path().string())};
}

Result<ListedFiles> shards_in_index(const std::filesystem::path& directory,
                                    std::span<const std::string> skip_prefixes) {
    RETURN_IF_ERROR(check_checkpoint_directory(directory));
    const std::filesystem::path path = directory / kIndexName;
    RETURN_IF_ERROR(open_regular(path));
    std::ifstream stream(path, std::ios::binary);
    WeightMap map(path, skip_prefixes);
    json::sax_parse(stream, &map);
    if (stream.bad()) return system_error(errno, "read", path);
    return map.take();
}

Status visit_shards(const std::filesystem::path& directory,
                    std::span<const std::string> skip_prefixes,
                    const std::function<Status(const ShardHeader& shard)>& visit) {
    ASSIGN_OR_RETURN(const ListedFiles shards, shards_in_index(directory, skip_prefixes));
    for (const auto& [shard, n_tensors] : shards) {
        const std::filesystem::path path = directory / shard;
        Result<OpenFile> opened = open_regular(path);
        if (!opened.has_value())
            return missing_shard(std::move(opened).error(), directory / kIndexName, shard,
                                 n_tensors);
        const OpenFile& file = *opened;
        NamePool names;
        ASSIGN_OR_RETURN(
            const std::vector<TensorInfo> tensors,
            read_safetensors_header(file.fd.get(), file.bytes, path, names, skip_prefixes));
        RETURN_IF_ERROR(visit({file.fd.get(), path, tensors}));
    }
    return Status::ok();
}

}  // namespace k3::storage
