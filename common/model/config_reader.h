#pragma once
// Private to common/model: takes fields out of a parsed config.json and remembers what is wrong.
//
// A field is named by its dotted path ("text_config.hidden_size"). Every accessor returns some
// legal value even if the field is bad, so that one pass over all fields finds all problems; the
// values count only if status() is fine.

#include <cstdint>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <string_view>
#include <vector>

#include "common/base/result.h"

namespace k3::model {

class ConfigReader {
  public:
    /// Borrows `root`. `where` heads every error.
    ConfigReader(const nlohmann::json& root, std::string where);

    /// A whole number from `min` to `max`.
    std::uint64_t integer(std::string_view path, std::uint64_t min, std::uint64_t max);
    /// A size, count or id that fits 32 bits.
    std::uint32_t size(std::string_view path, std::uint32_t min, std::uint32_t max);
    /// A finite number with min <= x <= max.
    float number(std::string_view path, double min, double max);
    bool flag(std::string_view path);
    std::vector<std::uint64_t> integers(std::string_view path);

    /// The field must be there and have this value; JSON text, e.g. `"kimi_k3"` with its quotes.
    void must_be(std::string_view path, std::string_view json_text);
    /// The field may be absent or null: both mean "not used".
    void must_be_null(std::string_view path);
    /// The object must have exactly this one member.
    void must_hold_only(std::string_view path, std::string_view member);
    void must_equal(std::string_view path, std::string_view other_path);

    /// Something that contradicts itself although every field is legal by itself.
    void contradiction(std::string sentence);

    /// Errors: incompatible; absent fields first and all of them, otherwise the first three
    /// problems.
    Status status() const;

  private:
    /// Null, and noted as absent, if there is no such field.
    const nlohmann::json* find(std::string_view path);
    const nlohmann::json* lookup(std::string_view path) const;
    void wrong(std::string_view path, const nlohmann::json& value, std::string_view wanted);

    const nlohmann::json& root_;
    std::string where_;
    std::vector<std::string> absent_;
    std::vector<std::string> problems_;
};

}  // namespace k3::model
