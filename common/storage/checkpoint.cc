#include "common/storage/checkpoint.h"

#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <string>
#include <tuple>
#include <utility>

#include "common/storage/json_names.h"
#include "common/storage/name_table.h"
#include "common/storage/shard_headers.h"

namespace k3::storage {

namespace {

constexpr std::uint64_t kMaxIndexBytes = 1'000'000'000;  // the released one has about 60 MB
constexpr std::string_view kCopyAgain = "copy the index and the shards again from the same release";

struct Shard {
    std::filesystem::path path;
    Fd fd;
};

Error corrupt(const std::filesystem::path& path, std::string_view what) {
    return Error{ErrorCode::corrupt, fmt::format("{}: {}", path.string(), what),
                 std::string(kCopyAgain)};
}

/// The index file in memory. Parsed once to learn the shards and once more to check every entry,
/// which is cheaper than keeping half a million entries.
class Index {
  public:
    static Result<Index> read(const std::filesystem::path& directory) {
        Index index;
        index.path_ = directory / kIndexName;
        ASSIGN_OR_RETURN(OpenFile file, open_regular(index.path_));
        if (file.bytes > kMaxIndexBytes)
            return corrupt(index.path_, fmt::format("{} bytes are more than the {} an index may "
                                                    "have",
                                                    file.bytes, kMaxIndexBytes));
        index.json_ = simdjson::padded_string(file.bytes);
        RETURN_IF_ERROR(read_exactly(
            file.fd.get(), 0,
            std::as_writable_bytes(std::span<char>(index.json_.data(), file.bytes)), index.path_));
        return index;
    }

    const std::filesystem::path& path() const noexcept { return path_; }

    /// Calls `visit(tensor name, shard name)` for every entry until it returns an error.
    template <typename Visit>
    Status for_each(Visit visit) {
        try {
            simdjson::ondemand::document document = parser_.iterate(json_);
            simdjson::ondemand::object root = document.get_object();
            simdjson::ondemand::object map = root.find_field_unordered("weight_map").get_object();
            for (auto field : map) {
                std::string_view name = plain_text(field.key());
                RETURN_IF_ERROR(visit(name, plain_text(field.value().get_raw_json_string())));
            }
        } catch (const simdjson::simdjson_error& e) {
            return corrupt(path_, fmt::format("not an index of tensors (a JSON object whose "
                                              "weight_map names each tensor's file): {}",
                                              e.what()));
        }
        return Status::ok();
    }

  private:
    std::filesystem::path path_;
    simdjson::padded_string json_;
    simdjson::ondemand::parser parser_;
};

/// A shard that holds text tensors, as the index has it.
struct ListedShard {
    std::string file;
    std::string first_tensor;  // the smallest name
    std::size_t n_tensors = 0;
};

/// In order of their first tensors: then the sorted tensors of one shard mostly follow those of the
/// one before. (In order of file names they would not: layer 10 sorts between layers 1 and 2.)
Result<std::vector<ListedShard>> shards_of(Index& index,
                                           std::span<const std::string> skip_prefixes) {
    std::map<std::string, ListedShard, std::less<>> listed;
    auto last = listed.end();
    RETURN_IF_ERROR(index.for_each([&](std::string_view name, std::string_view file) -> Status {
        if (has_prefix(name, skip_prefixes)) return Status::ok();
        if (last == listed.end() || last->first != file) {
            if (file.empty() || file.find('/') != std::string_view::npos || file == "..")
                return corrupt(index.path(), fmt::format("'{}', named for tensor {}, is not the "
                                                         "name of a file beside the index",
                                                         file, name));
            last = listed.try_emplace(std::string(file)).first;
        }
        ListedShard& shard = last->second;
        if (shard.n_tensors == 0 || name < shard.first_tensor) shard.first_tensor = name;
        ++shard.n_tensors;
        return Status::ok();
    }));
    if (listed.empty()) return corrupt(index.path(), "names no tensor");
    std::vector<ListedShard> shards;
    for (auto& [file, shard] : listed) {
        shard.file = file;
        shards.push_back(std::move(shard));
    }
    std::sort(shards.begin(), shards.end(), [](const ListedShard& a, const ListedShard& b) {
        return std::tie(a.first_tensor, a.file) < std::tie(b.first_tensor, b.file);
    });
    return shards;
}

/// Appends `run`, which is in order of name, so that `all` stays in order.
void merge_sorted(std::vector<TensorInfo>& all, const std::vector<TensorInfo>& run) {
    auto by_name = [](const TensorInfo& a, const TensorInfo& b) { return a.name < b.name; };
    auto middle = static_cast<std::ptrdiff_t>(all.size());
    all.insert(all.end(), run.begin(), run.end());
    if (run.empty() || middle == 0 || all[all.size() - run.size() - 1].name < run.front().name)
        return;
    auto first = std::lower_bound(all.begin(), all.begin() + middle, run.front(), by_name);
    std::inplace_merge(first, all.begin() + middle, all.end(), by_name);
}

}  // namespace

std::vector<std::string> vision_prefixes() { return {"vision_tower.", "mm_projector."}; }

class Checkpoint::Impl {
  public:
    explicit Impl(Options options) : options_(std::move(options)) {}

    Status open() {
        RETURN_IF_ERROR(check_checkpoint_directory(options_.directory));
        ASSIGN_OR_RETURN(Index index, Index::read(options_.directory));
        ASSIGN_OR_RETURN(std::vector<ListedShard> listed, shards_of(index, options_.skip_prefixes));
        std::size_t n_tensors = 0;
        for (const ListedShard& shard : listed) n_tensors += shard.n_tensors;
        tensors.reserve(n_tensors);
        for (const ListedShard& shard : listed) RETURN_IF_ERROR(open_shard(shard, index.path()));
        if (std::uint32_t twice = table.build(tensors); twice != NameTable::kNone)
            return in_two_shards(twice);
        return check_against(index);
    }

    const std::filesystem::path& directory() const noexcept { return options_.directory; }

    std::vector<Shard> shards;
    std::vector<TensorInfo> tensors;
    NameTable table;

  private:
    Status open_shard(const ListedShard& shard, const std::filesystem::path& index) {
        std::filesystem::path path = options_.directory / shard.file;
        Result<OpenFile> opened = open_regular(path);
        if (!opened)
            return missing_shard(std::move(opened).error(), index, shard.file, shard.n_tensors);
        ASSIGN_OR_RETURN(std::vector<TensorInfo> run,
                         read_safetensors_header(opened->fd.get(), opened->bytes, path, names_,
                                                 options_.skip_prefixes));
        for (TensorInfo& tensor : run) tensor.shard = static_cast<std::uint32_t>(shards.size());
        merge_sorted(tensors, run);
        shards.push_back({std::move(path), std::move(opened->fd)});
        return Status::ok();
    }

    Status in_two_shards(std::uint32_t twice) const {
        const TensorInfo& second = tensors[twice];
        const TensorInfo& first = tensors[table.find(second.name)];
        return corrupt(options_.directory,
                       fmt::format("tensor {} lies in {} and in {}", second.name,
                                   shards[first.shard].path.filename().string(),
                                   shards[second.shard].path.filename().string()));
    }

    /// Every entry of the index is in the shard it names, and every tensor is in the index.
    Status check_against(Index& index) const {
        std::vector<bool> listed(tensors.size());
        RETURN_IF_ERROR(index.for_each([&](std::string_view name, std::string_view file) -> Status {
            if (has_prefix(name, options_.skip_prefixes)) return Status::ok();
            std::uint32_t found = table.find(name);
            if (found == NameTable::kNone)
                return corrupt(index.path(), fmt::format("promises tensor {} in {}, and that file "
                                                         "does not hold it",
                                                         name, file));
            std::string actual = shards[tensors[found].shard].path.filename().string();
            if (actual != file)
                return corrupt(index.path(), fmt::format("promises tensor {} in {}, but it lies "
                                                         "in {}",
                                                         name, file, actual));
            if (listed[found])
                return corrupt(index.path(), fmt::format("names tensor {} twice", name));
            listed[found] = true;
            return Status::ok();
        }));
        auto unlisted = std::find(listed.begin(), listed.end(), false);
        if (unlisted == listed.end()) return Status::ok();
        const TensorInfo& tensor = tensors[static_cast<std::size_t>(unlisted - listed.begin())];
        return corrupt(index.path(),
                       fmt::format("does not name tensor {}, which {} holds", tensor.name,
                                   shards[tensor.shard].path.filename().string()));
    }

    Options options_;
    NamePool names_;
};

Checkpoint::Checkpoint(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
Checkpoint::~Checkpoint() = default;

Result<std::shared_ptr<const Checkpoint>> Checkpoint::open(Options options) {
    auto impl = std::make_unique<Impl>(std::move(options));
    RETURN_IF_ERROR(impl->open());
    return std::shared_ptr<const Checkpoint>(new Checkpoint(std::move(impl)));
}

const TensorInfo* Checkpoint::find(std::string_view name) const noexcept {
    std::uint32_t found = impl_->table.find(name);
    return found == NameTable::kNone ? nullptr : &impl_->tensors[found];
}

Result<const TensorInfo*> Checkpoint::require(std::string_view name, DType dtype,
                                              std::span<const std::uint64_t> shape) const {
    const TensorInfo* tensor = find(name);
    if (tensor == nullptr)
        return Error{ErrorCode::not_found,
                     fmt::format("{} holds no tensor {}", directory().string(), name),
                     "check that the checkpoint is complete and that config.json belongs to it"};
    if (tensor->dtype != dtype || !same_shape(tensor->shape, shape))
        return Error{ErrorCode::incompatible,
                     fmt::format("{}: tensor {} is {} {}, and config.json calls for {} {}",
                                 shard_path(tensor->shard).string(), name, to_string(tensor->dtype),
                                 to_string(tensor->shape), to_string(dtype), to_string(shape)),
                     "use config.json and shards of the same release"};
    return tensor;
}

Status Checkpoint::read(const TensorInfo& tensor, std::span<std::byte> dst) const {
    K3_CHECK(dst.size() == tensor.bytes,
             fmt::format("{}: {} bytes for {}", tensor.name, dst.size(), tensor.bytes));
    Status status = read_range(tensor.shard, tensor.offset, dst);
    if (!status)
        return std::move(status).error().with_context(fmt::format("tensor {}", tensor.name));
    return Status::ok();
}

Status Checkpoint::read_range(std::uint32_t shard, std::uint64_t offset,
                              std::span<std::byte> dst) const {
    K3_CHECK(shard < impl_->shards.size(), fmt::format("shard {}", shard));
    const Shard& from = impl_->shards[shard];
    return read_exactly(from.fd.get(), offset, dst, from.path);
}

Status Checkpoint::read_range(std::uint32_t shard, std::uint64_t offset,
                              std::span<const std::span<std::byte>> parts) const {
    K3_CHECK(shard < impl_->shards.size(), fmt::format("shard {}", shard));
    const Shard& from = impl_->shards[shard];
    return read_exactly(from.fd.get(), offset, parts, from.path);
}

std::span<const TensorInfo> Checkpoint::tensors() const noexcept { return impl_->tensors; }
const std::filesystem::path& Checkpoint::directory() const noexcept { return impl_->directory(); }
std::uint32_t Checkpoint::n_shards() const noexcept {
    return static_cast<std::uint32_t>(impl_->shards.size());
}
const std::filesystem::path& Checkpoint::shard_path(std::uint32_t shard) const noexcept {
    return impl_->shards[shard].path;
}

}  // namespace k3::storage
