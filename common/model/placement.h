#pragma once
// Which (layer, expert) a server holds: parsed from a setting, announced as bits.

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "common/base/result.h"
#include "common/model/config.h"
#include "common/transport/messages/control.h"

namespace k3::model {

/// Experts of every MoE layer as bits. add() needs a layer and an expert that exist.
class Placement {
  public:
    Placement() = default;
    Placement(std::uint32_t n_layers, std::uint32_t n_experts);

    bool holds(std::uint32_t layer, std::uint32_t expert) const noexcept;
    void add(std::uint32_t layer, std::uint32_t expert);
    std::uint64_t count() const noexcept;
    std::uint32_t n_layers() const noexcept { return n_layers_; }
    std::uint32_t n_experts() const noexcept { return n_experts_; }

    /// As a server announces them: only layers of which it holds something, in order.
    std::vector<msg::ExpertHolding> holdings() const;

  private:
    std::uint32_t n_layers_ = 0;
    std::uint32_t n_experts_ = 0;
    std::size_t layer_bytes_ = 0;
    std::vector<std::uint8_t> bits_;  // [n_layers, layer_bytes_], expert e at bit e % 8
};

/// Parses a share of all routed experts:
///   "all"                      every expert of every MoE layer
///   "1/3"                      striped: expert e of layer L with (e + L) mod 3 == 1
///   "experts 0-7,12"           these experts of every MoE layer
///   "layers 1-4"               all experts of these layers
///   "layers 1-4 experts 0-7; layers 5-12 experts 8-23"   unions of products, ';' between
/// Errors: invalid_argument, naming the text, the bad part and the legal range.
Result<Placement> parse_share(std::string_view share, const ModelConfig& config);

}  // namespace k3::model
