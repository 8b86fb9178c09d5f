#include "common/storage/safetensors.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <bit>
#include <cstring>
#include <optional>
#include <tuple>
#include <utility>

#include "common/storage/json_names.h"

namespace k3::storage {

static_assert(std::endian::native == std::endian::little, "safetensors is little-endian");

namespace {

constexpr std::uint64_t kMaxHeaderBytes = 100'000'000;  // the limit of the reference library
constexpr std::string_view kCopyFileAgain = "copy the file again from its source";

Error corrupt_shard(const std::filesystem::path& path, std::string_view what) {
    return Error{ErrorCode::corrupt, fmt::format("{}: {}", path.string(), what),
                 std::string(kCopyFileAgain)};
}

std::optional<DType> parse_dtype(std::string_view text) {
    for (DType dtype : {DType::u8, DType::bf16, DType::f32})
        if (text == to_string(dtype)) return dtype;
    return std::nullopt;
}

/// A tensor's entry as the JSON has it; offsets still relative to the data.
struct Entry {
    std::string_view name;
    std::string_view dtype;
    std::array<std::uint64_t, Shape::kMaxDims> sizes{};
    std::size_t n_dims = 0;
    std::uint64_t begin = 0;
    std::uint64_t end = 0;
};

/// Throws simdjson_error if a part is missing or of the wrong type.
Entry parse_entry(std::string_view name, simdjson::ondemand::object fields) {
    Entry entry;
    entry.name = name;
    bool has_dtype = false;
    bool has_shape = false;
    std::size_t n_offsets = 0;
    for (auto field : fields) {
        std::string_view key = plain_text(field.key());
        if (key == "dtype") {
            entry.dtype = plain_text(field.value().get_raw_json_string());
            has_dtype = true;
        } else if (key == "shape") {
            for (auto size : field.value().get_array()) {
                std::uint64_t value = size.get_uint64();
                if (entry.n_dims < Shape::kMaxDims) entry.sizes[entry.n_dims] = value;
                ++entry.n_dims;
            }
            has_shape = true;
        } else if (key == "data_offsets") {
            for (auto offset : field.value().get_array()) {
                std::uint64_t value = offset.get_uint64();
                (n_offsets == 0 ? entry.begin : entry.end) = value;
                ++n_offsets;
            }
        }
    }
    if (!has_dtype || !has_shape || n_offsets != 2)
        throw simdjson::simdjson_error(simdjson::NO_SUCH_FIELD);
    return entry;
}

/// shape x dtype in bytes, or nothing if that exceeds 64 bits.
std::optional<std::uint64_t> bytes_of(const Entry& entry, DType dtype) {
    std::uint64_t bytes = size_of(dtype);
    for (std::size_t i = 0; i < entry.n_dims; ++i)
        if (__builtin_mul_overflow(bytes, entry.sizes[i], &bytes)) return std::nullopt;
    return bytes;
}

Result<TensorInfo> checked_tensor(const Entry& entry, std::uint64_t data_start,
                                  const std::filesystem::path& path) {
    std::optional<DType> dtype = parse_dtype(entry.dtype);
    if (!dtype)
        return Error{ErrorCode::incompatible,
                     fmt::format("{}: tensor {} has dtype {}, and only U8, BF16 and F32 are known",
                                 path.string(), entry.name, entry.dtype),
                     "use the checkpoint as released, not a conversion of it"};
    if (entry.n_dims > Shape::kMaxDims)
        return corrupt_shard(path, fmt::format("tensor {} has {} dimensions, more than {}",
                                               entry.name, entry.n_dims, Shape::kMaxDims));
    Shape shape(std::span<const std::uint64_t>(entry.sizes.data(), entry.n_dims));
    std::optional<std::uint64_t> wanted = bytes_of(entry, *dtype);
    std::uint64_t bytes = entry.end - entry.begin;
    if (!wanted || *wanted != bytes)
        return corrupt_shard(
            path, fmt::format("tensor {} of shape {} and dtype {} takes {} bytes, but its "
                              "range has {}",
                              entry.name, to_string(shape), to_string(*dtype),
                              wanted ? std::to_string(*wanted) : "over 2^64", bytes));
    TensorInfo info;
    info.name = entry.name;
    info.shape = shape;
    info.dtype = *dtype;
    info.offset = data_start + entry.begin;
    info.bytes = bytes;
    return info;
}

/// A byte range of the data, skipped tensors included.
struct Range {
    std::uint64_t begin;
    std::uint64_t end;
    std::string_view name;
};

Status check_ranges(std::vector<Range>& ranges, std::uint64_t data_bytes, std::uint64_t data_start,
                    const std::filesystem::path& path) {
    for (const Range& range : ranges)
        if (range.begin > range.end)
            return corrupt_shard(
                path, fmt::format("tensor {} begins at {} and ends before it, at {}", range.name,
                                  range.begin, range.end));
    std::sort(ranges.begin(), ranges.end(), [](const Range& a, const Range& b) {
        return std::tie(a.begin, a.end) < std::tie(b.begin, b.end);
    });
    std::uint64_t file_bytes = data_start + data_bytes;
    auto beyond = [&](const Range& range) { return range.end > data_bytes; };
    if (auto n = std::count_if(ranges.begin(), ranges.end(), beyond); n > 0) {
        const Range& first = *std::find_if(ranges.begin(), ranges.end(), beyond);
        return corrupt_shard(
            path, fmt::format("truncated: tensor {} lies at bytes {} to {} of the data "
                              "that begins at {}, but the file has {} bytes ({} of {} "
                              "tensors lie beyond its end)",
                              first.name, first.begin, first.end, data_start, file_bytes, n,
                              ranges.size()));
    }
    const Range* previous = nullptr;
    for (const Range& range : ranges) {
        if (range.begin == range.end) continue;
        if (previous != nullptr && range.begin < previous->end)
            return corrupt_shard(
                path, fmt::format("tensors {} and {} overlap: bytes {} to {} and {} to {}",
                                  previous->name, range.name, data_start + previous->begin,
                                  data_start + previous->end, data_start + range.begin,
                                  data_start + range.end));
        previous = &range;
    }
    return Status::ok();
}

Result<std::uint64_t> read_header_length(int fd, std::uint64_t file_bytes,
                                         const std::filesystem::path& path) {
    if (file_bytes < 8)
        return corrupt_shard(path,
                             fmt::format("truncated: {} bytes, and a safetensors file begins with "
                                         "a header length of 8",
                                         file_bytes));
    std::uint64_t n = 0;
    RETURN_IF_ERROR(read_exactly(fd, 0, std::as_writable_bytes(std::span(&n, 1)), path));
    if (n == 0) return corrupt_shard(path, "header length 0");
    if (n > file_bytes - 8)
        return corrupt_shard(
            path, fmt::format("header length {} goes beyond the file's {} bytes", n, file_bytes));
    if (n > kMaxHeaderBytes)
        return corrupt_shard(path,
                             fmt::format("header length {} exceeds {} bytes", n, kMaxHeaderBytes));
    return n;
}

/// Throws simdjson_error. The names point into `json`.
std::vector<Entry> parse_entries(const simdjson::padded_string& json) {
    simdjson::ondemand::parser parser;
    simdjson::ondemand::document document = parser.iterate(json);
    std::vector<Entry> entries;
    for (auto field : document.get_object()) {
        std::string_view name = plain_text(field.key());
        if (name == "__metadata__") continue;
        entries.push_back(parse_entry(name, field.value().get_object()));
    }
    require_end(document);
    return entries;
}

}  // namespace

std::string_view to_string(DType dtype) noexcept {
    switch (dtype) {
        case DType::u8:
            return "U8";
        case DType::bf16:
            return "BF16";
        case DType::f32:
            return "F32";
    }
    return "?";
}

std::size_t size_of(DType dtype) noexcept {
    switch (dtype) {
        case DType::u8:
            return 1;
        case DType::bf16:
            return 2;
        case DType::f32:
            return 4;
    }
    return 1;
}

std::uint64_t TensorSpec::bytes() const noexcept {
    std::uint64_t bytes = size_of(dtype);
    for (const std::uint64_t size : shape) bytes *= size;
    return bytes;
}

std::uint64_t total_bytes(std::span<const TensorSpec> tensors) noexcept {
    std::uint64_t total = 0;
    for (const TensorSpec& tensor : tensors) total += tensor.bytes();
    return total;
}

Shape::Shape(std::span<const std::uint64_t> sizes)
    : n_dims_(static_cast<std::uint32_t>(sizes.size())) {
    K3_CHECK(sizes.size() <= kMaxDims, fmt::format("{} dimensions", sizes.size()));
    std::copy(sizes.begin(), sizes.end(), sizes_.begin());
}

bool same_shape(std::span<const std::uint64_t> a, std::span<const std::uint64_t> b) noexcept {
    return std::equal(a.begin(), a.end(), b.begin(), b.end());
}

std::string to_string(std::span<const std::uint64_t> shape) {
    return fmt::format("[{}]", fmt::join(shape, ", "));
}

std::string_view NamePool::add(std::string_view name) {
    if (name.empty()) return {};
    if (name.size() > left_) {
        std::size_t block = std::max(kBlockBytes, name.size());
        next_ = blocks_.emplace_back(std::make_unique_for_overwrite<char[]>(block)).get();
        left_ = block;
    }
    std::memcpy(next_, name.data(), name.size());
    std::string_view kept(next_, name.size());
    next_ += name.size();
    left_ -= name.size();
    return kept;
}

bool has_prefix(std::string_view name, std::span<const std::string> prefixes) noexcept {
    return std::any_of(prefixes.begin(), prefixes.end(),
                       [&](const std::string& prefix) { return name.starts_with(prefix); });
}

Result<std::vector<TensorInfo>> read_safetensors_header(
    int fd, std::uint64_t file_bytes, const std::filesystem::path& path, NamePool& names,
    std::span<const std::string> skip_prefixes) {
    ASSIGN_OR_RETURN(std::uint64_t n, read_header_length(fd, file_bytes, path));
    simdjson::padded_string json(n);
    RETURN_IF_ERROR(
        read_exactly(fd, 8, std::as_writable_bytes(std::span<char>(json.data(), n)), path));
    std::vector<Entry> entries;
    try {
        entries = parse_entries(json);
    } catch (const simdjson::simdjson_error& e) {
        return corrupt_shard(path,
                             fmt::format("the header ({} bytes at offset 8) is not the JSON of a "
                                         "safetensors file: {}",
                                         n, e.what()));
    }

    std::uint64_t data_start = 8 + n;
    std::vector<Range> ranges;
    ranges.reserve(entries.size());
    for (const Entry& entry : entries) ranges.push_back({entry.begin, entry.end, entry.name});
    RETURN_IF_ERROR(check_ranges(ranges, file_bytes - data_start, data_start, path));

    std::vector<TensorInfo> tensors;
    tensors.reserve(entries.size());
    for (const Entry& entry : entries) {
        if (has_prefix(entry.name, skip_prefixes)) continue;
        ASSIGN_OR_RETURN(tensors.emplace_back(), checked_tensor(entry, data_start, path));
    }
    auto by_name = [](const TensorInfo& a, const TensorInfo& b) { return a.name < b.name; };
    std::sort(tensors.begin(), tensors.end(), by_name);
    for (std::size_t i = 0; i < tensors.size(); ++i) {
        if (i > 0 && tensors[i].name == tensors[i - 1].name)
            return corrupt_shard(path,
                                 fmt::format("the header names tensor {} twice", tensors[i].name));
        tensors[i].name = names.add(tensors[i].name);
    }
    return tensors;
}

}  // namespace k3::storage
