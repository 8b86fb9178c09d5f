#pragma once
// One safetensors file: its header, validated, and reads of byte ranges.
//
// Format: u64 little-endian header length n, n bytes of JSON, data. Spec section 2.2.

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "common/base/fd.h"
#include "common/base/result.h"

namespace k3::storage {

enum class DType : std::uint8_t { u8, bf16, f32 };
std::string_view to_string(DType dtype) noexcept;  // as safetensors spells it: "BF16"
std::size_t size_of(DType dtype) noexcept;

struct TensorInfo {
    std::string name;
    DType dtype = DType::u8;
    std::vector<std::uint64_t> shape;  // at most 4 dimensions
    std::uint32_t shard = 0;           // index into Checkpoint's shards; 0 in a single file
    std::uint64_t offset = 0;          // of the first byte, from the start of the file
    std::uint64_t bytes = 0;
};

/// Reads and validates the header of an open file. `path` only appears in errors.
/// Errors, all naming the file and the numbers: corrupt (header length 0, beyond the file or over
/// 100 MB; not JSON; offsets out of order, beyond the file, overlapping or not covering shape x
/// dtype), unsupported (a dtype this build does not know), io.
Result<std::vector<TensorInfo>> read_safetensors_header(int fd, std::uint64_t file_bytes,
                                                        const std::filesystem::path& path);

/// pread until `dst` is full. Errors: corrupt (file ends early: offset, wanted, got), io (errno).
Status read_exactly(int fd, std::uint64_t offset, std::span<std::byte> dst,
                    const std::filesystem::path& path);

}  // namespace k3::storage
