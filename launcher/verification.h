#pragma once
// Whether the bytes of a checkpoint or a pack are those that were written; `k3pipe verify`.

#include <cstdint>
#include <filesystem>
#include <string>

#include "common/base/result.h"
#include "launcher/digest_job.h"

namespace k3::launcher {

struct VerifyOptions {
    std::size_t n_threads = 4;
    /// Where journals go; empty: where journal_for says.
    std::filesystem::path journal;
    DigestProgress progress;
};

/// What was found to be right, as a sentence: "96 files, 1.4 TiB: ...".
struct Verified {
    std::string what;
    std::uint64_t resumed_bytes = 0;
};

/// Header, table and every checksum of a pack.
/// Errors: those of Pack::open; corrupt (pieces that are damaged, the first of them named).
Result<Verified> verify_pack(const std::filesystem::path& file, const VerifyOptions& options);

/// Index and headers, that every tensor the config calls for is there, and if there is a manifest,
/// the size and every checksum of every file in it.
/// Errors: those of model::open_model and check_*_tensors; corrupt (damaged parts, the first of
/// them named).
Result<Verified> verify_checkpoint(const std::filesystem::path& directory,
                                   const VerifyOptions& options);

/// The SHA-256 of every file in `sums` (as sha256sum writes it, names relative to `directory`).
Result<Verified> verify_sha256(const std::filesystem::path& directory,
                               const std::filesystem::path& sums, const VerifyOptions& options);

/// Writes the manifest of what lies in `directory` now. Errors: as verify_checkpoint, those of
/// write_manifest.
Result<Verified> record_checkpoint(const std::filesystem::path& directory,
                                   const VerifyOptions& options);

}  // namespace k3::launcher
