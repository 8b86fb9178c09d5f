#pragma once
// Well-formed UTF-8, and what to do with bytes that are not (Unicode standard, table 3-7).
//
// One function walks over text for everybody: the encoder to name the first bad byte, the
// pre-tokeniser to read characters, the decoder to know whether trailing bytes may still become a
// character or can be given up at once.

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string_view>

namespace k3::tokenizer {

struct Utf8Step {
    enum class Kind : std::uint8_t {
        character,   // `bytes` bytes are one character
        ill_formed,  // `bytes` bytes can never be part of one: the maximal subpart, one U+FFFD
        incomplete,  // the text ends, but more bytes could complete the character
    };
    Kind kind = Kind::character;
    std::uint8_t bytes = 0;   // 1 to 4
    char32_t code_point = 0;  // of a character
};

/// What begins at `at`, which must be less than text.size().
Utf8Step utf8_step(std::string_view text, std::size_t at) noexcept;

/// Offset of the first byte that does not belong to a whole character, if there is one.
std::optional<std::size_t> first_invalid_utf8(std::string_view text) noexcept;

}  // namespace k3::tokenizer
