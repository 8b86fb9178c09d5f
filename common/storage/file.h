#pragma once
// Opening and reading files, with errors that name the file and the numbers.

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <span>
#include <string>
#include <string_view>

#include "common/base/fd.h"
#include "common/base/result.h"

namespace k3::storage {

struct OpenFile {
    Fd fd;  // read-only, closed on exec
    std::uint64_t bytes = 0;
};

/// Opens a regular file (links are followed).
/// Errors: not_found, io (with the operating system's reason), corrupt ("not a regular file": a
/// folder or a pipe stands in the place of data).
Result<OpenFile> open_regular(const std::filesystem::path& path);

/// Errors: not_found (nothing there, or not a directory), with what belongs there as the remedy.
Status check_checkpoint_directory(const std::filesystem::path& directory);
/// That remedy.
inline constexpr const char* kNameCheckpoint =
    "name the directory that holds config.json and model.safetensors.index.json";

/// pread until `dst` is full. Any thread. `path` only appears in errors.
/// Errors: corrupt (the file ends early: offset, wanted, got), io.
Status read_exactly(int fd, std::uint64_t offset, std::span<std::byte> dst,
                    const std::filesystem::path& path);

/// The same for bytes that lie together in the file and apart in memory: one preadv fills `parts`
/// (at most kMaxParts) one after the other.
inline constexpr std::size_t kMaxParts = 16;
Status read_exactly(int fd, std::uint64_t offset, std::span<const std::span<std::byte>> parts,
                    const std::filesystem::path& path);

/// A whole small file. Errors: as above, and corrupt if it has more than `max_bytes`.
Result<std::string> read_text_file(const std::filesystem::path& path, std::uint64_t max_bytes);

/// pwrite until all of `bytes` are written. Errors: those of write_error.
Status write_exactly(int fd, std::uint64_t offset, std::span<const std::byte> bytes,
                     const std::filesystem::path& path);

/// Makes a new name in `directory` outlive a power failure. Error: io.
Status sync_directory(const std::filesystem::path& directory);

/// What this user may still write on the disk of `path`, which exists. Error: io.
Result<std::uint64_t> free_disk_bytes(const std::filesystem::path& path);

/// For a failed write: resource_exhausted with the bytes wanted and those free where there is no
/// room (full disk, quota, limit of file sizes), else as system_error.
Error write_error(int error_number, const std::filesystem::path& path, std::uint64_t bytes);

/// An Error for a failed system call on `path`: not_found for ENOENT and ENOTDIR, else io.
/// `doing` completes "cannot ... PATH", e.g. "open".
Error system_error(int error_number, std::string_view doing, const std::filesystem::path& path);

}  // namespace k3::storage
