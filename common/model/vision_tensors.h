#pragma once
// The tensors of the released vision tower, which this text engine skips: a checkpoint holds them,
// and readers have to pass over them. Spec section 2.3.

#include <vector>

#include "common/storage/safetensors.h"

namespace k3::model {

/// Three tensors, of shard 95.
std::vector<storage::TensorSpec> vision_projector_tensors();
/// 165 tensors, of shard 96.
std::vector<storage::TensorSpec> vision_tower_tensors();

}  // namespace k3::model
