#include "common/model/placement.h"

#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <charconv>
#include <optional>
#include <utility>

namespace k3::model {

namespace {

Error refuse(std::string_view share, std::string_view what) {
    return Error{ErrorCode::invalid_argument, fmt::format("share '{}': {}", share, what),
                 "write all, I/N (striped), or lists such as 'layers 1-4 experts 0-7,12'"};
}

std::string_view trim(std::string_view text) {
    while (!text.empty() && text.front() == ' ') text.remove_prefix(1);
    while (!text.empty() && text.back() == ' ') text.remove_suffix(1);
    return text;
}

/// Cuts `text` at the first `separator`; the second part is empty if there is none.
std::pair<std::string_view, std::string_view> cut(std::string_view text, char separator) {
    std::size_t at = text.find(separator);
    if (at == std::string_view::npos) return {text, {}};
    return {text.substr(0, at), text.substr(at + 1)};
}

std::optional<std::uint32_t> parse_number(std::string_view text) {
    std::uint32_t value = 0;
    auto [end, code] = std::from_chars(text.data(), text.data() + text.size(), value);
    if (code != std::errc{} || end != text.data() + text.size()) return std::nullopt;
    return value;
}

/// What may stand in a list, and how to call it.
struct Range {
    std::string_view what;
    std::uint32_t first;
    std::uint32_t last;
};

/// "0-7,12" as numbers. Parts may overlap.
Result<std::vector<std::uint32_t>> parse_list(std::string_view share, std::string_view list,
                                              Range legal) {
    std::vector<std::uint32_t> numbers;
    auto bad = [&](std::string_view part) {
        return refuse(share, fmt::format("'{}' is not a number or range of {} from {} to {}", part,
                                         legal.what, legal.first, legal.last));
    };
    for (std::string_view rest = list;;) {
        std::size_t comma = rest.find(',');
        std::string_view part = trim(rest.substr(0, comma));
        auto [low, high] = cut(part, '-');
        std::optional<std::uint32_t> first = parse_number(trim(low));
        bool single = low.size() == part.size();
        std::optional<std::uint32_t> last = single ? first : parse_number(trim(high));
        if (!first || !last || *first > *last || *first < legal.first || *last > legal.last)
            return bad(part);
        for (std::uint32_t n = *first; n <= *last; ++n) numbers.push_back(n);
        if (comma == std::string_view::npos) return numbers;
        rest.remove_prefix(comma + 1);
    }
}

std::vector<std::uint32_t> all_of(Range range) {
    std::vector<std::uint32_t> numbers;
    for (std::uint32_t n = range.first; n <= range.last; ++n) numbers.push_back(n);
    return numbers;
}

/// Splits "layers A experts B" into its two lists; either may be absent, not both.
struct Product {
    std::optional<std::string_view> layers;
    std::optional<std::string_view> experts;
};

Result<Product> split_product(std::string_view share, std::string_view text) {
    Product product;
    std::string_view rest = text;
    while (!rest.empty()) {
        auto [word, after] = cut(rest, ' ');
        // A list ends where the next word begins: lists hold digits, commas, dashes and spaces.
        std::size_t end = std::min(after.find_first_not_of("0123456789,- "), after.size());
        std::string_view list = trim(after.substr(0, end));
        std::optional<std::string_view>* part = nullptr;
        if (word == "layers") part = &product.layers;
        if (word == "experts") part = &product.experts;
        if (part == nullptr)
            return refuse(share, fmt::format("'{}' is neither 'layers' nor 'experts'", word));
        if (part->has_value()) return refuse(share, fmt::format("'{}' occurs twice", word));
        if (list.empty()) return refuse(share, fmt::format("no numbers after '{}'", word));
        *part = list;
        rest = after.substr(end);
    }
    return product;
}

Status add_striped(Placement& placement, std::string_view share, Range layers) {
    auto [index_text, count_text] = cut(share, '/');
    std::optional<std::uint32_t> index = parse_number(trim(index_text));
    std::optional<std::uint32_t> count = parse_number(trim(count_text));
    if (!index || !count || *count == 0 || *count > placement.n_experts() || *index >= *count)
        return refuse(share, fmt::format("a stripe I/N needs N from 1 to {} and I from 0 to N - 1",
                                         placement.n_experts()));
    for (std::uint32_t layer = layers.first; layer <= layers.last; ++layer)
        for (std::uint32_t expert = 0; expert < placement.n_experts(); ++expert)
            if ((std::uint64_t{expert} + layer) % *count == *index) placement.add(layer, expert);
    return Status::ok();
}

Status add_product(Placement& placement, std::string_view share, std::string_view text,
                   Range layers, Range experts) {
    if (text.empty()) return refuse(share, "a part is empty");
    ASSIGN_OR_RETURN(Product product, split_product(share, text));
    std::vector<std::uint32_t> chosen_layers = all_of(layers);
    std::vector<std::uint32_t> chosen_experts = all_of(experts);
    if (product.layers) {
        ASSIGN_OR_RETURN(chosen_layers, parse_list(share, *product.layers, layers));
    }
    if (product.experts) {
        ASSIGN_OR_RETURN(chosen_experts, parse_list(share, *product.experts, experts));
    }
    for (std::uint32_t layer : chosen_layers)
        for (std::uint32_t expert : chosen_experts) placement.add(layer, expert);
    return Status::ok();
}

}  // namespace

Placement::Placement(std::uint32_t n_layers, std::uint32_t n_experts)
    : n_layers_(n_layers),
      n_experts_(n_experts),
      layer_bytes_((n_experts + 7) / 8),
      bits_(std::size_t{n_layers} * layer_bytes_) {}

bool Placement::holds(std::uint32_t layer, std::uint32_t expert) const noexcept {
    if (layer >= n_layers_ || expert >= n_experts_) return false;
    return ((bits_[layer * layer_bytes_ + expert / 8] >> (expert % 8)) & 1U) != 0;
}

void Placement::add(std::uint32_t layer, std::uint32_t expert) {
    K3_CHECK(layer < n_layers_ && expert < n_experts_,
             fmt::format("layer {} of {}, expert {} of {}", layer, n_layers_, expert, n_experts_));
    bits_[layer * layer_bytes_ + expert / 8] |= static_cast<std::uint8_t>(1U << (expert % 8));
}

std::uint64_t Placement::count() const noexcept {
    std::uint64_t n = 0;
    for (std::uint8_t byte : bits_) n += static_cast<std::uint64_t>(std::popcount(byte));
    return n;
}

std::vector<msg::ExpertHolding> Placement::holdings() const {
    std::vector<msg::ExpertHolding> all;
    for (std::uint32_t layer = 0; layer < n_layers_; ++layer) {
        auto first = bits_.begin() + static_cast<std::ptrdiff_t>(layer * layer_bytes_);
        auto last = first + static_cast<std::ptrdiff_t>(layer_bytes_);
        if (std::all_of(first, last, [](std::uint8_t byte) { return byte == 0; })) continue;
        msg::ExpertHolding& holding = all.emplace_back();
        holding.layer = layer;
        holding.experts.assign(first, last);
    }
    return all;
}

Result<Placement> parse_share(std::string_view share, const ModelConfig& config) {
    Placement placement(config.n_layers, config.moe.n_experts);
    const Range layers{"layers", config.first_k_dense, config.n_layers - 1};
    const Range experts{"experts", 0, config.moe.n_experts - 1};
    std::string_view text = trim(share);
    if (text.empty()) return refuse(share, "nothing is named");
    if (text == "all") {
        for (std::uint32_t layer = layers.first; layer <= layers.last; ++layer)
            for (std::uint32_t e = 0; e <= experts.last; ++e) placement.add(layer, e);
    } else if (text.find('/') != std::string_view::npos) {
        RETURN_IF_ERROR(add_striped(placement, text, layers));
    } else {
        for (std::string_view rest = text;;) {
            std::size_t end = rest.find(';');
            RETURN_IF_ERROR(
                add_product(placement, share, trim(rest.substr(0, end)), layers, experts));
            if (end == std::string_view::npos) break;
            rest.remove_prefix(end + 1);
        }
    }
    return placement;
}

}  // namespace k3::model
