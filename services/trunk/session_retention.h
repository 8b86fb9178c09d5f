#pragma once
// Which saved sessions a directory of limited size gives up: those that were saved or loaded
// longest ago.
//
// The files of one session, one for each trunk stage that saved it here, go together. Several
// stages may share a directory; each counts everything in it. Files that are no saved sessions are
// neither counted nor touched.

#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

#include "common/base/result.h"

namespace k3::trunk {

/// Removes sessions until `file`, with `bytes`, and the others take at most `limit_bytes`; returns
/// the names of those removed. The session of `file` itself stays, and so does one that is being
/// read (it is locked, session_file.h) or written (a part of it is there).
/// Error: resource_exhausted, with the numbers, if it cannot fit. Nothing is removed if that is
/// known beforehand; that others are being read is not.
Result<std::vector<std::string>> make_room(const std::filesystem::path& directory,
                                           std::uint64_t limit_bytes,
                                           const std::filesystem::path& file, std::uint64_t bytes);

}  // namespace k3::trunk
