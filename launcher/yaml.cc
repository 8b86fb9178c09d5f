#include "launcher/yaml.h"

#include <algorithm>
#include <nlohmann/json.hpp>
#include <string_view>
#include <utility>

namespace k3::launcher {

namespace {

using Json = nlohmann::ordered_json;

constexpr std::size_t kStep = 2;

bool is_bare_key(const std::string& key) {
    return !key.empty() && std::ranges::all_of(key, [](char c) {
        return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || c == '-' || c == '_' ||
               c == '.' || c == '/' || (c >= '0' && c <= '9');
    }) && ((key[0] >= 'a' && key[0] <= 'z') || (key[0] >= 'A' && key[0] <= 'Z'));
}

/// Lines of printable ASCII, the first not indented and each ended, which a literal block keeps.
bool is_literal(std::string_view text) {
    if (text.size() < 2 || text.back() != '\n' || text[text.size() - 2] == '\n' ||
        text.front() == ' ' || text.front() == '\n')
        return false;
    return std::ranges::all_of(text, [](char c) { return c == '\n' || (c >= ' ' && c <= '~'); });
}

std::string scalar(const Json& value, std::size_t indent) {
    if (value.is_object()) return "{}";  // empty: others are blocks
    if (value.is_array()) return "[]";
    if (!value.is_string() || !is_literal(value.get_ref<const std::string&>()))
        return value.dump(-1, ' ', false, Json::error_handler_t::replace);
    const std::string& text = value.get_ref<const std::string&>();
    std::string out = "|";
    for (std::size_t at = 0; at < text.size();) {
        const std::size_t end = text.find('\n', at);
        out += '\n';
        if (end > at) out += std::string(indent, ' ') + text.substr(at, end - at);
        at = end + 1;
    }
    return out;
}

bool is_block(const Json& value) { return value.is_structured() && !value.empty(); }

/// What stands in the current line is given already; further lines are indented.
void write(const Json& value, std::size_t indent, std::string& out);

void write_object(const Json& value, std::size_t indent, std::string& out) {
    bool is_first = true;
    for (const auto& [key, item] : value.items()) {
        if (!std::exchange(is_first, false)) out += std::string(indent, ' ');
        out += is_bare_key(key) ? key : Json(key).dump();
        if (is_block(item)) {
            const std::size_t inner = indent + kStep;
            out += ":\n" + std::string(inner, ' ');
            write(item, inner, out);
        } else {
            out += ": " + scalar(item, indent + kStep) + "\n";
        }
    }
}

void write_list(const Json& value, std::size_t indent, std::string& out) {
    bool is_first = true;
    for (const Json& item : value) {
        if (!std::exchange(is_first, false)) out += std::string(indent, ' ');
        out += "- ";
        write(item, indent + kStep, out);
    }
}

void write(const Json& value, std::size_t indent, std::string& out) {
    if (!is_block(value))
        out += scalar(value, indent) + "\n";
    else if (value.is_object())
        write_object(value, indent, out);
    else
        write_list(value, indent, out);
}

}  // namespace

std::string to_yaml(const Json& value) {
    std::string out;
    write(value, 0, out);
    return out;
}

}  // namespace k3::launcher
