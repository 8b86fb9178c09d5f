#pragma once
// The layers of a stage, under the names that the trunk uses.

#include "common/model/layer_range.h"

namespace k3::trunk {

using model::LayerRange;
using model::parse_layers;

}  // namespace k3::trunk
