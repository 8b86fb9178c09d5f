#pragma once
// The part of `k3pipe plan` that tells what a model weighs, part by part. Spec section 5.

#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

#include "common/base/result.h"
#include "common/model/load.h"

namespace k3::launcher {

/// 17547264 -> "17,547,264".
std::string grouped(std::uint64_t number);

/// Whether the checkpoint holds every tensor that its config calls for, with type and shape.
/// Errors: those of model::check_trunk_tensors and check_expert_tensors.
Status check_complete(const model::Model& model);

std::vector<std::filesystem::path> shard_paths(const storage::Checkpoint& checkpoint);

/// The table, ending in a newline. A model without checkpoint has its weights in packs.
std::string model_table(const model::Model& model);

}  // namespace k3::launcher
