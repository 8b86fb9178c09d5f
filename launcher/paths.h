#pragma once
// Where things lie: this program, the services beside it, the shipped pipeline files.
//
// Nothing is compiled in: everything is found from the place of the running binary, so that a build
// tree, an installed tree and a moved copy of either work alike.

#include <filesystem>
#include <string>
#include <string_view>
#include <vector>

#include "common/base/result.h"

namespace k3::launcher {

/// The folder of the running program. Error: io.
Result<std::filesystem::path> program_directory();

/// The folder with demo.toml: $K3PIPE_CONFIGS, else ../share/k3pipe/configs (installed), else the
/// one named in the file k3pipe.configs beside the program (build tree).
/// Error: invalid_argument naming the places looked at.
Result<std::filesystem::path> configs_directory();

/// Where trunk stages keep saved sessions unless the pipeline file says otherwise:
/// ${XDG_STATE_HOME:-$HOME/.local/state}/k3pipe/sessions. Empty if neither is set.
std::filesystem::path default_session_directory();

/// Where the keys of pipelines lie unless their files say otherwise:
/// ${XDG_CONFIG_HOME:-$HOME/.config}/k3pipe/keys. Empty if neither is set.
std::filesystem::path default_key_directory();

/// An executable: a path is taken as it is; a bare name is looked for beside this program, in
/// ../services/<name without k3-> (build tree), then in $PATH.
/// Error: invalid_argument naming the places looked at.
Result<std::filesystem::path> find_program(const std::string& name, std::string_view what);

}  // namespace k3::launcher
