#pragma once
// A JSON value as chat requests need it: order of members kept, numbers spelled as the released
// encoder spells them, hostile input bounded.
//
// The released encoder works on values parsed by Python and printed by Python. Text that reaches
// the model therefore depends on how Python prints numbers (1e2 is "100.0", 1.50 is "1.5", integers
// of any length stay exact), so numbers are kept as that text instead of as doubles, which no C++
// library prints the same way.

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "common/base/result.h"

namespace k3::tokenizer {

struct JsonMember;

struct Json {
    enum class Kind : std::uint8_t { null, boolean, number, string, array, object };

    Kind kind = Kind::null;
    bool boolean = false;
    std::string text;                 // of a string; of a number, as Python prints it
    std::vector<Json> items;          // of an array
    std::vector<JsonMember> members;  // of an object, in the order given, each key once

    bool is(Kind k) const noexcept { return kind == k; }
    /// The member's value, or null if this is no object or has no such member. A member whose
    /// value is null counts as absent.
    const Json* find(std::string_view key) const noexcept;
};

struct JsonMember {
    std::string key;
    Json value;
};

/// "null", "boolean", "number", "string", "array", "object".
std::string_view to_string(Json::Kind kind) noexcept;

/// Bounds of a parsed text: containers inside each other, and values in all. Both keep a small
/// message from taking the process's stack or memory.
inline constexpr std::size_t kMaxJsonDepth = 100;
inline constexpr std::size_t kMaxJsonValues = std::size_t{1} << 20U;

/// Of members with the same key the last value counts, in the place of the first.
/// Errors: invalid_argument, beginning with `what` and naming the byte offset (not UTF-8, not JSON,
/// a number no double can hold) or the bound. The text itself is never quoted.
Result<Json> parse_json(std::string_view text, std::string_view what);

/// Keys sorted at every level, no spaces, characters beyond ASCII as they are.
std::string to_sorted_json(const Json& value);
/// Members in order, ", " and ": " between them, characters beyond ASCII as they are.
std::string to_spaced_json(const Json& value);

}  // namespace k3::tokenizer
