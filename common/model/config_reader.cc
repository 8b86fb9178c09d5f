#include "common/model/config_reader.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>
#include <span>
#include <utility>

namespace k3::model {

namespace {

using nlohmann::json;

constexpr std::string_view kRemedy =
    "use the config.json that was released with this checkpoint; nothing is assumed";

/// A value as it appears in a sentence: its JSON, cut if it is long.
std::string shown(const json& value) {
    std::string text = value.dump(-1, ' ', true, json::error_handler_t::replace);
    constexpr std::size_t kLongest = 60;
    return text.size() <= kLongest ? text : text.substr(0, kLongest) + "...";
}

}  // namespace

ConfigReader::ConfigReader(const json& root, std::string where)
    : root_(root), where_(std::move(where)) {}

const json* ConfigReader::lookup(std::string_view path) const {
    const json* at = &root_;
    while (true) {
        std::size_t dot = path.find('.');
        if (!at->is_object()) return nullptr;
        auto member = at->find(path.substr(0, dot));
        if (member == at->end()) return nullptr;
        at = &*member;
        if (dot == std::string_view::npos) return at;
        path.remove_prefix(dot + 1);
    }
}

const json* ConfigReader::find(std::string_view path) {
    const json* value = lookup(path);
    if (value == nullptr && std::find(absent_.begin(), absent_.end(), path) == absent_.end())
        absent_.emplace_back(path);
    return value;
}

void ConfigReader::wrong(std::string_view path, const json& value, std::string_view wanted) {
    problems_.push_back(fmt::format("{} is {}, and {} is needed", path, shown(value), wanted));
}

std::uint64_t ConfigReader::integer(std::string_view path, std::uint64_t min, std::uint64_t max) {
    const json* value = find(path);
    if (value == nullptr) return min;
    if (value->is_number_unsigned()) {
        std::uint64_t n = value->get<std::uint64_t>();
        if (n >= min && n <= max) return n;
    }
    wrong(path, *value, fmt::format("a whole number from {} to {}", min, max));
    return min;
}

std::uint32_t ConfigReader::size(std::string_view path, std::uint32_t min, std::uint32_t max) {
    return static_cast<std::uint32_t>(integer(path, min, max));
}

float ConfigReader::number(std::string_view path, double min, double max) {
    const json* value = find(path);
    if (value == nullptr) return static_cast<float>(min);
    if (value->is_number()) {
        double x = value->get<double>();
        if (std::isfinite(x) && x >= min && x <= max) return static_cast<float>(x);
    }
    wrong(path, *value, fmt::format("a number from {} to {}", min, max));
    return static_cast<float>(min);
}

bool ConfigReader::flag(std::string_view path) {
    const json* value = find(path);
    if (value == nullptr) return false;
    if (!value->is_boolean()) {
        wrong(path, *value, "true or false");
        return false;
    }
    return value->get<bool>();
}

std::vector<std::uint64_t> ConfigReader::integers(std::string_view path) {
    const json* value = find(path);
    if (value == nullptr) return {};
    auto is_whole = [](const json& item) { return item.is_number_unsigned(); };
    if (!value->is_array() || !std::all_of(value->begin(), value->end(), is_whole)) {
        wrong(path, *value, "a list of whole numbers");
        return {};
    }
    return value->get<std::vector<std::uint64_t>>();
}

void ConfigReader::must_be(std::string_view path, std::string_view json_text) {
    const json* value = find(path);
    if (value == nullptr) return;
    json wanted = json::parse(json_text);
    // 1 and 1.0 compare equal, and so they should; true and 1 do not.
    if (*value != wanted) wrong(path, *value, json_text);
}

void ConfigReader::must_be_null(std::string_view path) {
    const json* value = lookup(path);
    if (value != nullptr && !value->is_null()) wrong(path, *value, "null");
}

void ConfigReader::must_hold_only(std::string_view path, std::string_view member) {
    const json* value = find(path);
    if (value == nullptr) return;
    if (!value->is_object() || value->size() != 1 || !value->contains(member))
        wrong(path, *value, fmt::format("an object with the one member {}", member));
}

void ConfigReader::must_equal(std::string_view path, std::string_view other_path) {
    const json* value = find(path);
    const json* other = find(other_path);
    if (value != nullptr && other != nullptr && *value != *other)
        problems_.push_back(fmt::format("{} is {} and {} is {}, and they must be equal", path,
                                        shown(*value), other_path, shown(*other)));
}

void ConfigReader::contradiction(std::string sentence) { problems_.push_back(std::move(sentence)); }

Status ConfigReader::status() const {
    if (!absent_.empty())
        return Error{ErrorCode::incompatible,
                     fmt::format("{} lacks {} needed field{}: {}", where_, absent_.size(),
                                 absent_.size() == 1 ? "" : "s", fmt::join(absent_, ", ")),
                     std::string(kRemedy)};
    if (problems_.empty()) return Status::ok();
    constexpr std::size_t kShown = 3;
    std::span<const std::string> first(problems_.data(), std::min(kShown, problems_.size()));
    std::string more;
    if (problems_.size() > kShown) more = fmt::format(" (and {} more)", problems_.size() - kShown);
    return Error{ErrorCode::incompatible,
                 fmt::format("{}: {}{}", where_, fmt::join(first, "; "), more),
                 std::string(kRemedy)};
}

}  // namespace k3::model
