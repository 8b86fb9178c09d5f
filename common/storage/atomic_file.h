#pragma once
// A file that is there as a whole or not at all, whatever happens while it is written.
//
// The bytes go to a file beside it with a name of its own; commit() brings them to the disk and
// gives them the right name. Until then a file of that name stays as it was: a process that is
// killed, a disk that is full, a machine that loses power leave the old file or none.

#include <sys/types.h>

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <span>
#include <string>
#include <string_view>
#include <utility>

#include "common/base/fd.h"
#include "common/base/result.h"

namespace k3::storage {

/// Move-only. Without commit() the destructor removes what was written.
class AtomicFile {
  public:
    /// Reserves room for `bytes`, so that a full disk is known before anything is written, and
    /// removes what processes that died left of earlier writes. Two processes may write
    /// the same file: each writes its own, and the last to commit wins.
    /// Errors: resource_exhausted (no room: bytes needed and free), not_found (directory), io.
    static Result<AtomicFile> create(const std::filesystem::path& path, std::uint64_t bytes,
                                     mode_t mode = 0600);
    AtomicFile(AtomicFile&& other) noexcept;
    AtomicFile& operator=(AtomicFile&&) = delete;
    ~AtomicFile();

    /// Errors: resource_exhausted (no room: bytes left to write and free), io.
    Status append(std::span<const std::byte> bytes);
    /// All bytes have been appended. Errors: resource_exhausted, io; the old file is still there.
    Status commit();

  private:
    AtomicFile(std::filesystem::path path, std::filesystem::path partial, Fd fd,
               std::uint64_t bytes)
        : path_(std::move(path)),
          partial_(std::move(partial)),
          fd_(std::move(fd)),
          left_bytes_(bytes) {}
    Error failed(int error_number, std::string_view doing) const;

    std::filesystem::path path_;
    std::filesystem::path partial_;  // empty: committed or moved from
    Fd fd_;
    std::uint64_t left_bytes_ = 0;
};

/// Whether a file of ours may take the place of what is at `path`: of nothing, or of a regular file
/// (no link to one) that begins with `magic`. `kind` says what such a file is: "a key file".
/// Error: invalid_argument.
Status check_replaceable(const std::filesystem::path& path, std::string_view magic,
                         std::string_view kind);

/// A whole file at once. Errors: those of AtomicFile.
Status replace_file(const std::filesystem::path& path, std::string_view bytes, mode_t mode = 0600);

/// Removes what processes that are gone, or this one, left in `directory` of files that they were
/// writing, where `is_ours` (the name of the file to be, the path of what is there of it) agrees.
/// To be called before this process writes there. A part is empty or begins as the file does.
void sweep_partial_files(const std::filesystem::path& directory,
                         const std::function<bool(const std::string& name,
                                                  const std::filesystem::path& partial)>& is_ours);

}  // namespace k3::storage
