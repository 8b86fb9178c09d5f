#include "common/model/layer_range.h"

#include <charconv>
#include <optional>
#include <string>

namespace k3::model {

namespace {

std::optional<std::uint32_t> number(std::string_view text) {
    std::uint32_t value = 0;
    const char* end = text.data() + text.size();
    auto [stop, problem] = std::from_chars(text.data(), end, value);
    if (problem != std::errc{} || stop != end || text.empty()) return std::nullopt;
    return value;
}

}  // namespace

Result<LayerRange> parse_layers(std::string_view text, const model::ModelConfig& config) {
    if (text == "all") return LayerRange{0, config.n_layers};
    const std::size_t dash = text.find('-');
    const auto first = number(text.substr(0, dash));
    const auto last = dash == std::string_view::npos ? first : number(text.substr(dash + 1));
    if (first && last && *first <= *last && *last < config.n_layers)
        return LayerRange{*first, *last - *first + 1};
    return Error{ErrorCode::invalid_argument,
                 "layers \"" + std::string(text) + "\" is no range of the layers 0-" +
                     std::to_string(config.n_layers - 1) + " of " + config.name,
                 "write all, or first-last with both ends included, like 0-" +
                     std::to_string((config.n_layers - 1) / 2)};
}

}  // namespace k3::model
