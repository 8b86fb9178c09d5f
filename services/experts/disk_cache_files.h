#pragma once
// The files of a disk cache: one for each expert, and what says whose they are.
//
// docs/formats/disk_cache.md is the page of these bytes. An entry is written under another name and
// renamed when it is complete, and it carries a checksum that is compared at every read: what a
// crash, a full disk or a flipped bit leaves behind is either no entry or one that is refused. So
// nothing has to be synchronised with the disk, which would cost more than the cache saves.
//
// Threads: read() any, the others one.

#include <atomic>
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
#include "common/experts/expert_key.h"

namespace k3::experts {

class DiskCacheFiles {
  public:
    struct Owner {
        std::string fingerprint;         // of the checkpoint, 32 hex digits
        std::uint64_t record_bytes = 0;  // of every expert
    };

    /// Makes the directory if it does not exist and locks it until the object ends. Removes what
    /// an earlier process left half-written.
    /// Errors: resource_exhausted (another process uses it), incompatible (it is of another
    /// checkpoint, or holds other things), io.
    static Result<DiskCacheFiles> open(const std::filesystem::path& directory, const Owner& owner);

    /// Bytes of an entry's file, and of the memory it is written from.
    static std::uint64_t entry_bytes(std::uint64_t record_bytes) noexcept;
    /// What an entry takes besides in the directory, rounded up.
    static constexpr std::uint64_t kEntryOverheadBytes = 256;
    /// What the lock, the owner and an empty directory take, rounded up.
    static constexpr std::uint64_t kFixedBytes = std::uint64_t{64} << 10U;

    /// For people: why the directory's identity was written anew; empty if it was not.
    const std::string& repaired() const noexcept { return repaired_; }
    /// Where the experts' values are kept (kept_experts.h).
    std::filesystem::path values_path() const { return directory_ / "values"; }
    const std::filesystem::path& directory() const noexcept { return directory_; }
    std::filesystem::path path_of(ExpertKey key) const;

    /// The entries that are there, unread. Error: io.
    Result<std::vector<ExpertKey>> list() const;

    /// Reads an entry into `slot` (at least entry_bytes(), beginning on a block) and returns where
    /// its record lies. Past the page cache if the file system can.
    /// Errors: not_found, corrupt (not as long as it should be, of another expert, wrong checksum),
    /// io.
    Result<std::span<const std::byte>> read(ExpertKey key, std::span<std::byte> slot) const;

    /// Where in the memory of an entry its record has to be put before write().
    std::span<std::byte> record_of(std::span<std::byte> entry) const noexcept;
    /// Writes the entry's file, under a name that is no entry's; `entry` [entry_bytes()], beginning
    /// on a block, holds the record, the rest is set here. Error: io (disk full, read-only, ...);
    /// nothing is left then.
    Status write(ExpertKey key, std::span<std::byte> entry);
    /// Makes what write() has just written the entry of `key`, or removes it again. Error: io.
    Status commit(ExpertKey key);
    void discard() noexcept;
    /// No error if there is none.
    void remove(ExpertKey key) noexcept;

  private:
    DiskCacheFiles(std::filesystem::path directory, const Owner& owner);
    Status lock();
    Status claim();
    Status write_owner() const;
    Status check_empty() const;
    void try_direct();
    Fd open_entry(const char* name, int flags) const;
    Error damaged(ExpertKey key, std::string_view what) const;

    std::filesystem::path directory_;
    Owner owner_;
    std::string repaired_;
    Fd folder_;
    Fd lock_;
    /// Whether files are opened for direct access. Behind a pointer so that the object can move.
    mutable std::unique_ptr<std::atomic<bool>> direct_;
};

}  // namespace k3::experts
