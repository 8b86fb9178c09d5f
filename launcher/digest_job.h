#pragma once
// Digests of many parts of files, at the rate of the device, in as many sittings as it takes.
//
// Several threads read, each a part of its own. What is done is appended to a journal, one line for
// each part, so that Ctrl-C or a crash costs seconds of work out of hours. A journal belongs to one
// state of the files: its first line holds their sizes and times, and a journal with another first
// line is begun anew. It is removed when all is done.

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "common/base/result.h"
#include "common/storage/direct_file.h"

namespace k3::launcher {

/// A part of a file. Its offset is a multiple of kBlockBytes.
struct FilePart {
    std::size_t file = 0;  // index into the job's files
    std::uint64_t offset = 0;
    std::uint64_t bytes = 0;
    std::uint64_t piece_bytes =
        0;  // not 0: the XXH3 of the XXH3 of each piece (a pack's checksums)
};

enum class DigestKind { xxh3, sha256 };

struct DigestJob {
    DigestKind kind = DigestKind::xxh3;
    std::vector<std::filesystem::path> files;
    std::vector<FilePart> parts;
    std::filesystem::path journal;  // empty: none is kept
    std::size_t n_threads = 4;
};

/// Bytes that are done, and all; false stops.
using DigestProgress = std::function<bool(std::uint64_t done, std::uint64_t total)>;

struct PartDigest {
    std::string hex;             // empty if the part could not be read
    std::optional<Error> error;  // then: corrupt (the file ends early), io
};

struct Digests {
    std::vector<PartDigest> parts;    // as in the job
    std::uint64_t resumed_bytes = 0;  // of them, known from the journal
};

/// Parts of `bytes` bytes, the last one shorter; one empty part for an empty file.
void add_parts(std::vector<FilePart>& parts, std::size_t file, std::uint64_t file_bytes,
               std::uint64_t bytes);

/// XXH3-64 as 16 hex digits.
std::string xxh3_hex(std::uint64_t digest);

/// Parts that cannot be read do not end the job. `progress` is called from this thread.
/// Errors: not_found or io (a file cannot be opened), resource_exhausted (the journal is in use by
/// another process, or has no room), cancelled.
Result<Digests> run_digests(const DigestJob& job, const DigestProgress& progress);

/// Where the journal of a job on `path` is kept: $XDG_CACHE_HOME/k3pipe or ~/.cache/k3pipe, or
/// nowhere (empty) if there is neither.
std::filesystem::path journal_for(const std::filesystem::path& path, DigestKind kind);

}  // namespace k3::launcher
