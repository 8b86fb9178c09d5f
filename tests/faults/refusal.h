#pragma once
// Pipelines that cannot start and requests that cannot be served: what such cases have in common.

#include <filesystem>
#include <string>
#include <vector>

#include "tests/support/pipeline.h"

namespace k3::test {

/// A pipeline file for `model` with these tables of stages.
std::string pipeline_of(const World& world, const std::filesystem::path& model,
                        const std::string& stages = "");

/// This command ends with `code`, one sentence that holds every one of `parts`, nothing on stdout,
/// and promptly.
void check_refused_command(const World& world, const std::vector<std::string>& argv, int code,
                           const std::vector<std::string>& parts);

/// `k3pipe run` with this file is refused so. `wrap`: words in front of the command.
void check_refused(const World& world, const std::string& file, int code,
                   const std::vector<std::string>& parts,
                   const std::vector<std::string>& wrap = {});

}  // namespace k3::test
