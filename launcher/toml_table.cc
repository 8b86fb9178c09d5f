#include "launcher/toml_table.h"

#include <fmt/format.h>

#include <algorithm>
#include <tuple>

#include "common/base/settings.h"

namespace k3::launcher {

namespace fs = std::filesystem;

Status TomlTable::text(std::string_view key, std::string* value) {
    const toml::node* node = take(key);
    if (node == nullptr) return Status::ok();
    const auto* found = node->as_string();
    if (found == nullptr)
        return wrong(*node, fmt::format("{} {} must be a string", heading_, key),
                     "write it in quotes");
    if (found->get().empty())
        return wrong(*node, fmt::format("{} {} is empty", heading_, key),
                     "give it a value, or remove it");
    *value = found->get();
    return Status::ok();
}

Status TomlTable::path(std::string_view key, fs::path* value) {
    std::string found;
    RETURN_IF_ERROR(text(key, &found));
    if (!found.empty()) *value = resolve(found);
    return Status::ok();
}

Status TomlTable::integer(std::string_view key, std::int64_t min, std::int64_t max,
                          std::int64_t* value) {
    const toml::node* node = take(key);
    if (node == nullptr) return Status::ok();
    const auto* found = node->as_integer();
    if (found == nullptr || found->get() < min || found->get() > max)
        return wrong(
            *node,
            fmt::format("{} {} must be a whole number from {} to {}", heading_, key, min, max),
            "write a number in that range, without quotes");
    *value = found->get();
    return Status::ok();
}

Status TomlTable::flag(std::string_view key, bool* value) {
    const toml::node* node = take(key);
    if (node == nullptr) return Status::ok();
    const auto* found = node->as_boolean();
    if (found == nullptr)
        return wrong(*node, fmt::format("{} {} must be true or false", heading_, key),
                     "write true or false without quotes");
    *value = found->get();
    return Status::ok();
}

Status TomlTable::choice(std::string_view key, const std::vector<std::string>& choices,
                         std::string* value) {
    const toml::node* node = table_.get(key);
    RETURN_IF_ERROR(text(key, value));
    if (node == nullptr || std::find(choices.begin(), choices.end(), *value) != choices.end())
        return Status::ok();
    return wrong(*node,
                 fmt::format("{} {} = '{}' is not one of {}", heading_, key, *value,
                             fmt::join(choices, ", ")),
                 suggestion(*value, choices, "choose one of them"));
}

const toml::node* TomlTable::take(std::string_view key) {
    taken_.insert(std::string(key));
    return table_.get(key);
}

std::vector<std::pair<std::string, const toml::node*>> TomlTable::rest() const {
    std::vector<std::pair<std::string, const toml::node*>> found;
    for (const auto& [key, node] : table_)
        if (!taken_.contains(std::string(key.str()))) found.emplace_back(key.str(), &node);
    std::stable_sort(found.begin(), found.end(), [](const auto& a, const auto& b) {
        const auto& x = a.second->source().begin;
        const auto& y = b.second->source().begin;
        return std::tie(x.line, x.column) < std::tie(y.line, y.column);
    });
    return found;
}

Error TomlTable::wrong(const toml::node& at, std::string_view what, std::string remedy) const {
    return Error{ErrorCode::invalid_argument,
                 fmt::format("{}:{}: {}", file_.string(), at.source().begin.line, what),
                 std::move(remedy)};
}

fs::path TomlTable::resolve(const std::string& text) const {
    fs::path path = (file_.parent_path() / text).lexically_normal();
    return path.has_filename() ? path : path.parent_path();  // "models/demo/" as "models/demo"
}

std::string suggestion(std::string_view word, const std::vector<std::string>& known,
                       std::string_view otherwise) {
    std::string nearest = nearest_name(word, known);
    return nearest.empty() ? std::string(otherwise) : fmt::format("did you mean {}?", nearest);
}

}  // namespace k3::launcher
