#pragma once
// The files that people name instead of a pipeline file.

#include <filesystem>
#include <vector>

namespace k3::launcher {

/// What a pipeline on one box reads its model from.
struct ModelFiles {
    std::filesystem::path directory;                // a checkpoint, or config and tokenizer only
    std::vector<std::filesystem::path> trunk_pack;  // or its parts; none: from the checkpoint
    std::filesystem::path experts_pack;             // empty: likewise
};

}  // namespace k3::launcher
