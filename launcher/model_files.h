#pragma once
// The files that people name instead of a pipeline file.

#include <filesystem>

namespace k3::launcher {

/// What a pipeline on one box reads its model from.
struct ModelFiles {
    std::filesystem::path directory;                 // a checkpoint, or config and tokenizer only
    std::filesystem::path trunk_pack, experts_pack;  // empty: from the checkpoint
};

}  // namespace k3::launcher
