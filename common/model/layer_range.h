#pragma once
// The layers that a stage of the trunk or a pack holds.

#include <cstdint>
#include <string_view>

#include "common/base/result.h"
#include "common/model/config.h"

namespace k3::model {

/// Layers [first, first + count) of a model.
struct LayerRange {
    std::uint32_t first = 0;
    std::uint32_t count = 0;
    std::uint32_t end() const noexcept { return first + count; }
    bool is_first() const noexcept { return first == 0; }
    bool is_last(const model::ModelConfig& config) const noexcept {
        return end() == config.n_layers;
    }
};

/// "all", "A-B" with both ends included, or "A".
/// Error: invalid_argument naming the text and the legal range.
Result<LayerRange> parse_layers(std::string_view text, const model::ModelConfig& config);

}  // namespace k3::model
