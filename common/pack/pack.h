#pragma once
// Reading a pack: trunk runs or expert records in one file, every byte of it checksummed.
//
// Opening reads header and table, never data. Data are read in pieces, past the page cache where
// the file system lets us, and every piece is compared with its checksum on every read: a disk that
// returns other bytes than were written costs an error, never a wrong token. XXH3 hashes some
// 10 GB/s and core, several times what a disk delivers.

#include <cstdint>
#include <filesystem>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "common/base/result.h"
#include "common/pack/format.h"
#include "common/storage/direct_file.h"

namespace k3::pack {

class Pack {
  public:
    using Mode = storage::DirectFile::Mode;

    /// Errors: not_found, io, corrupt (no pack, unfinished, truncated, header or table damaged),
    /// incompatible (a version that this build does not know).
    static Result<std::shared_ptr<const Pack>> open(const std::filesystem::path& path,
                                                    Mode mode = Mode::direct_if_possible);
    /// The same, and incompatible if it is of another kind.
    static Result<std::shared_ptr<const Pack>> open(const std::filesystem::path& path, Kind kind,
                                                    Mode mode = Mode::direct_if_possible);

    Kind kind() const noexcept { return kind_; }
    /// Error: incompatible if it is of another kind.
    Status check_kind(Kind kind) const;
    const Origin& origin() const noexcept { return origin_; }
    const Part& part() const noexcept { return part_; }
    const std::filesystem::path& path() const noexcept { return file_.path(); }
    std::uint64_t file_bytes() const noexcept { return file_.bytes(); }
    const storage::DirectFile& file() const noexcept { return file_; }
    /// Empty if reads go past the page cache.
    const std::string& why_buffered() const noexcept { return file_.why_buffered(); }

    /// In order of key, which is the order in the file.
    std::span<const Entry> entries() const noexcept { return entries_; }
    /// Null if there is none.
    const Entry* find(EntryKey key) const noexcept;

    /// Which pieces of an entry to read.
    struct Pieces {
        std::uint64_t first = 0;
        std::uint64_t count = 0;
    };
    /// Those that hold `bytes` bytes at `offset` of the entry's content.
    static Pieces pieces_of(const Entry& entry, std::uint64_t offset, std::uint64_t bytes) noexcept;
    /// What they take: a multiple of kBlockBytes.
    static std::uint64_t bytes_of(const Entry& entry, Pieces pieces) noexcept;

    /// Reads the pieces in one go and verifies each. dst begins on a block and has
    /// bytes_of(entry, pieces) bytes; it holds anything after an error. Any thread, several at a
    /// time. Errors name file, layer, part and offset: corrupt (a checksum differs, or the file
    /// has been truncated since), io.
    Status read(const Entry& entry, Pieces pieces, std::span<std::byte> dst) const;
    /// All pieces; dst has entry.stored_bytes().
    Status read(const Entry& entry, std::span<std::byte> dst) const;

    /// For whoever reads the file by other means: the checksum of a piece as recorded, and the
    /// comparison of what was read with it.
    std::uint64_t checksum(const Entry& entry, std::uint64_t piece) const noexcept {
        return checksums_[entry.first_piece + piece];
    }
    Status verify(const Entry& entry, Pieces pieces, std::span<const std::byte> bytes) const;

    /// "layer 4", "the embedding", "layer 4 expert 17".
    std::string name_of(EntryKey key) const;

  private:
    explicit Pack(storage::DirectFile file) : file_(std::move(file)) {}
    Result<format::Header> read_header() const;
    Status read_table(const format::Header& header);
    Status check_entries() const;
    Error corrupt(std::string what) const;

    storage::DirectFile file_;
    Kind kind_ = Kind::trunk;
    Origin origin_;
    Part part_;
    std::vector<Entry> entries_;
    std::vector<std::uint64_t> checksums_;
};

}  // namespace k3::pack
