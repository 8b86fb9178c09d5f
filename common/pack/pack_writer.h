#pragma once
// Writing a pack, so that neither Ctrl-C nor kill -9 nor a full disk costs what was done.
//
// The bytes go to FILE.partial, each at its final place, and so does the checksum of each piece as
// soon as the piece is written: the table of the unfinished file is the journal. Whoever finds
// such a file keeps the pieces whose bytes have the recorded checksum and writes the others. So no
// order of writes is needed for that, and what a power failure tore is written again. A file with
// the right name is complete and on the disk.

#include <cstdint>
#include <filesystem>
#include <functional>
#include <span>
#include <vector>

#include "common/base/result.h"
#include "common/pack/format.h"

namespace k3::pack {

struct PackPlan {
    Kind kind = Kind::trunk;
    Origin origin;
    Part part;
    std::vector<Entry> entries;  // at least one, in order of key; their places are ignored
};

/// Size of the finished file.
std::uint64_t file_bytes(const PackPlan& plan);

/// Fills `dst` with the bytes at `offset` of the content of an entry. Asked in order.
using PackSource =
    std::function<Status(const Entry& entry, std::uint64_t offset, std::span<std::byte> dst)>;

/// Bytes of the file that are right so far, and all; false stops.
using PackProgress = std::function<bool(std::uint64_t done, std::uint64_t total)>;

struct PackSummary {
    std::uint64_t file_bytes = 0;
    std::uint64_t kept_bytes = 0;  // of data, found in an unfinished file
};

/// Writes `path`, which must not exist yet, while its directory must.
/// Errors: invalid_argument (it exists), incompatible (FILE.partial is an unfinished pack of
/// something else), resource_exhausted (no room, with both numbers, before anything is written or
/// in the middle; another process writes it), io, cancelled, those of `source`. In every case but
/// the first three FILE.partial is left for the next attempt.
Result<PackSummary> write_pack(const PackPlan& plan, const std::filesystem::path& path,
                               const PackSource& source, const PackProgress& progress);

}  // namespace k3::pack
