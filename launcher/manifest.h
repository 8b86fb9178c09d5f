#pragma once
// The checksums of a checkpoint's files, recorded once when they are known to be right.
//
// A released checkpoint carries none. The manifest lies beside the shards, and has a checksum for
// every 16 MiB, so that damage is located and not only noticed. docs/formats/manifest.md.

#include <cstdint>
#include <filesystem>
#include <string>
#include <string_view>
#include <vector>

#include "common/base/result.h"

namespace k3::launcher {

inline constexpr std::string_view kManifestName = "k3pipe.manifest";
inline constexpr std::uint64_t kManifestPartBytes = std::uint64_t{16} << 20U;

struct ManifestFile {
    std::string name;  // in the directory of the manifest
    std::uint64_t bytes = 0;
    std::vector<std::string> parts;  // XXH3-64 of each kManifestPartBytes, 16 hex digits
};

struct Manifest {
    std::vector<ManifestFile> files;
};

/// Errors: not_found, io, corrupt (not a manifest, or damaged itself), incompatible (a version that
/// this build does not know).
Result<Manifest> read_manifest(const std::filesystem::path& path);

/// Error: invalid_argument, if there is a file at `path`.
Status check_no_manifest(const std::filesystem::path& path);

/// Writes all of it or nothing, on the disk when it returns.
/// Errors: as check_no_manifest, io, resource_exhausted.
Status write_manifest(const Manifest& manifest, const std::filesystem::path& path);

/// One line of a file of sums as sha256sum writes it.
struct Sha256Sum {
    std::string name;
    std::string hex;  // 64 digits, small letters
};
/// Errors: not_found, io, corrupt (a line that is none; a file without any).
Result<std::vector<Sha256Sum>> read_sha256_sums(const std::filesystem::path& path);

}  // namespace k3::launcher
