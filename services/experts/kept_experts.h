#pragma once
// Which experts a cache kept, for the next run: keys and values, no weights.
//
// Kept in a file (docs/formats/kept_experts.md) that is only ever replaced as a whole. It is
// advice: whoever reads it may lose time by following it, never a bit of the output, so a damaged
// file or one of another checkpoint is no reason to stop.

#include <cstdint>
#include <filesystem>
#include <string>
#include <string_view>
#include <vector>

#include "common/base/result.h"
#include "common/experts/expert_key.h"

namespace k3::experts {

struct KeptExperts {
    std::string fingerprint;  // of the checkpoint, 32 hex digits
    std::string policy;       // at most 16 characters
    std::vector<KeptExpert> experts;
};

/// Most valuable first.
void sort_by_value(std::vector<KeptExpert>& experts);

/// Bytes of a file of so many experts.
std::uint64_t kept_file_bytes(std::uint64_t n_experts) noexcept;

/// Replaces the file. Errors: io (permission, disk full, ...); the old file is as it was then.
Status save_kept(const std::filesystem::path& path, const KeptExperts& kept);

/// Errors: not_found (there is none), corrupt (truncated, damaged, of another version),
/// incompatible (of another checkpoint or policy, naming both), io.
Result<KeptExperts> load_kept(const std::filesystem::path& path, std::string_view fingerprint,
                              std::string_view policy);

}  // namespace k3::experts
