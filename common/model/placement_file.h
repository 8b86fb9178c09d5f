#pragma once
// A placement as a file: which server holds which experts of which checkpoint
// (docs/formats/placement.md).

#include <cstdint>
#include <filesystem>
#include <string>
#include <string_view>
#include <vector>

#include "common/base/result.h"
#include "common/model/load.h"
#include "common/model/placement.h"

namespace k3::model {

/// What a placement file begins with, whatever its version.
inline constexpr std::string_view kPlacementMagic = "k3pipe placement ";
inline constexpr std::uint64_t kMaxPlacementBytes = std::uint64_t{64} << 20U;

struct ServerPlacement {
    std::string name;  // of the expert server, as its --name
    std::uint32_t weight = 1;
    Placement held;
};

struct PlacementFile {
    std::string fingerprint;  // of the checkpoint
    std::vector<ServerPlacement> servers;
};

/// The bytes of a file; the same placement gives the same ones.
std::string format_placement(const PlacementFile& placement);

/// `source` is how errors call the file.
/// Errors: corrupt (no placement of this version, damaged, another checksum), incompatible (of
/// another checkpoint, both fingerprints named; experts that nobody holds).
Result<PlacementFile> parse_placement(std::string_view text, std::string_view source,
                                      const ModelConfig& config, std::string_view fingerprint);

/// Errors: as parse_placement; not_found, io.
Result<PlacementFile> read_placement(const std::filesystem::path& path, const Model& model);

/// Error: not_found, with the names that there are.
Result<const ServerPlacement*> find_server(const PlacementFile& placement, std::string_view name,
                                           std::string_view source);

/// What a server is given.
struct Share {
    Placement held;
    std::uint32_t weight = 1;
};

/// A share of the model's experts as settings spell it: what parse_share reads, or
///   "@FILE#NAME"   what the placement in FILE gives to server NAME, with its weight
/// Errors: those of parse_share, read_placement and find_server.
Result<Share> read_share(std::string_view share, const Model& model);

/// "@FILE#NAME".
std::string share_in_file(const std::filesystem::path& file, std::string_view name);

}  // namespace k3::model
