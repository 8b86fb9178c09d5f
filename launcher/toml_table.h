#pragma once
// Reading one table of a TOML file: typed values, and sentences that name file, line and key.

#include <toml++/toml.h>

#include <cstdint>
#include <filesystem>
#include <set>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "common/base/result.h"

namespace k3::launcher {

/// Remembers which keys were asked for: what nobody asked for is rest(). A value that is absent
/// leaves the caller's default alone; one of another type is invalid_argument.
class TomlTable {
  public:
    /// Borrows file and table. `heading` is how sentences call it: "[trunk]".
    TomlTable(const std::filesystem::path& file, const toml::table& table, std::string heading)
        : file_(file), table_(table), heading_(std::move(heading)) {}

    /// An empty one is hardly meant: refused.
    Status text(std::string_view key, std::string* value);
    /// Relative to the folder of the file.
    Status path(std::string_view key, std::filesystem::path* value);
    Status integer(std::string_view key, std::int64_t min, std::int64_t max, std::int64_t* value);
    Status flag(std::string_view key, bool* value);
    Status choice(std::string_view key, const std::vector<std::string>& choices,
                  std::string* value);
    /// Null if absent.
    const toml::node* take(std::string_view key);

    /// Keys nobody took, in the order of the file.
    std::vector<std::pair<std::string, const toml::node*>> rest() const;

    /// "<file>:<line of at>: <what>; <remedy>"
    Error wrong(const toml::node& at, std::string_view what, std::string remedy) const;
    const std::string& heading() const noexcept { return heading_; }
    std::filesystem::path resolve(const std::string& text) const;

  private:
    const std::filesystem::path& file_;
    const toml::table& table_;
    std::string heading_;
    std::set<std::string> taken_;
};

/// "did you mean <nearest of known>?", or `otherwise` if none is near.
std::string suggestion(std::string_view word, const std::vector<std::string>& known,
                       std::string_view otherwise);

}  // namespace k3::launcher
