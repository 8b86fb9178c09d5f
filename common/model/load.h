#pragma once
// Opening a model directory: config, index and fingerprint together.

#include <filesystem>
#include <memory>
#include <string>

#include "common/base/result.h"
#include "common/model/config.h"
#include "common/storage/checkpoint.h"

namespace k3::model {

struct Model {
    ModelConfig config;
    std::shared_ptr<const storage::Checkpoint> checkpoint;  // null: the weights lie in a pack
    std::string fingerprint;
};

/// Errors as load_config, Checkpoint::open and fingerprint.
Result<Model> open_model(const std::filesystem::path& directory);

}  // namespace k3::model
