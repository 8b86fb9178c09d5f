#pragma once
// One table of a stage in the pipeline file: the launcher's own keys, and the service's settings.

#include <cstdint>
#include <filesystem>
#include <string>

#include "launcher/pipeline_file.h"
#include "launcher/toml_table.h"

namespace k3::launcher {

/// Reads `table` under `heading` ("[trunk]") into `stage`; `count` copies of it are asked for.
/// Errors: invalid_argument, naming file, line and key.
Status read_stage(const std::filesystem::path& file, const toml::table& table,
                  msg::ServiceKind kind, std::string heading, StageSpec* stage,
                  std::int64_t* count);

}  // namespace k3::launcher
