#pragma once
// Where the keys of a pipeline lie, and how they get there.

#include <filesystem>
#include <string>

#include "common/base/result.h"
#include "launcher/pipeline_file.h"

namespace k3::launcher {

/// What the pipeline file says, else NAME.keys in the default directory. It need not exist.
/// Empty if there is no default directory either.
std::filesystem::path key_file_of(const PipelineSpec& spec);

/// Makes new keys and writes them, all or nothing, mode 0600. Returns their fingerprint.
/// Errors: invalid_argument (there is a key file, and `replace` is false; there is another file),
/// not_found (directory), io, resource_exhausted, unsupported.
Result<std::string> make_key_file(const std::filesystem::path& path, bool replace);

/// "keys: FILE, fingerprint 5f3a-...", or why the file cannot be used.
std::string describe_keys(const std::filesystem::path& path);

}  // namespace k3::launcher
