#pragma once
// One safetensors file: its header, validated.
//
// Format: u64 little-endian header length n, n bytes of JSON, data. Spec section 2.2. The order of
// the tensors in the JSON means nothing, and neither does the order of the data.
//
// The released checkpoint has half a million tensors, so a tensor's record owns nothing: its name
// lies in a NamePool and its shape inside the record (72 bytes, and 77 for the name).

#include <array>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "common/base/fd.h"
#include "common/base/result.h"
#include "common/storage/file.h"

namespace k3::storage {

enum class DType : std::uint8_t { u8, bf16, f32 };
std::string_view to_string(DType dtype) noexcept;  // as safetensors spells it: "BF16"
std::size_t size_of(DType dtype) noexcept;

/// Up to four sizes, slowest first; empty for a scalar. Reads like a vector.
class Shape {
  public:
    static constexpr std::size_t kMaxDims = 4;

    Shape() = default;
    /// At most kMaxDims sizes.
    explicit Shape(std::span<const std::uint64_t> sizes);

    std::size_t size() const noexcept { return n_dims_; }
    bool empty() const noexcept { return n_dims_ == 0; }
    std::uint64_t operator[](std::size_t dim) const noexcept { return sizes_[dim]; }
    const std::uint64_t* begin() const noexcept { return sizes_.data(); }
    const std::uint64_t* end() const noexcept { return sizes_.data() + n_dims_; }
    operator std::span<const std::uint64_t>() const noexcept { return {sizes_.data(), n_dims_}; }

  private:
    std::array<std::uint64_t, kMaxDims> sizes_{};
    std::uint32_t n_dims_ = 0;
};

bool same_shape(std::span<const std::uint64_t> a, std::span<const std::uint64_t> b) noexcept;
/// "[96, 40]".
std::string to_string(std::span<const std::uint64_t> shape);

/// A tensor as somebody expects or wants it, wherever it may lie.
struct TensorSpec {
    std::string name;
    DType dtype = DType::u8;
    std::vector<std::uint64_t> shape;  // at most Shape::kMaxDims sizes

    std::uint64_t bytes() const noexcept;
};

/// Payload of all of them.
std::uint64_t total_bytes(std::span<const TensorSpec> tensors) noexcept;

struct TensorInfo {
    std::string_view name;  // lives in the pool: as long as the Checkpoint
    Shape shape;
    DType dtype = DType::u8;
    std::uint32_t shard = 0;   // index into Checkpoint's shards; 0 in a single file
    std::uint64_t offset = 0;  // of the first byte, from the start of the file
    std::uint64_t bytes = 0;
};

/// Keeps names in a few large blocks; what add() returned stays valid as long as the pool.
class NamePool {
  public:
    std::string_view add(std::string_view name);

  private:
    static constexpr std::size_t kBlockBytes = std::size_t{1} << 20;
    std::vector<std::unique_ptr<char[]>> blocks_;
    char* next_ = nullptr;
    std::size_t left_ = 0;
};

/// True if `name` begins with one of `prefixes`.
bool has_prefix(std::string_view name, std::span<const std::string> prefixes) noexcept;

/// Reads and validates the header of an open file; `path` only appears in errors. The tensors come
/// in order of name, without those that begin with one of `skip_prefixes` (of these only the byte
/// range is checked, their type may be unknown). Gaps between tensors are allowed.
/// Errors, all naming the file and the numbers: corrupt (header length 0, beyond the file or over
/// 100 MB; not JSON; a tensor beyond the file, overlapping another, named twice, with more than
/// four dimensions or a byte range that differs from shape x dtype), incompatible (a dtype this
/// build does not know), io.
Result<std::vector<TensorInfo>> read_safetensors_header(
    int fd, std::uint64_t file_bytes, const std::filesystem::path& path, NamePool& names,
    std::span<const std::string> skip_prefixes = {});

}  // namespace k3::storage
