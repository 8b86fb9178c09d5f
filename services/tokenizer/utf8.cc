#include "services/tokenizer/utf8.h"

namespace k3::tokenizer {

namespace {

/// How a first byte goes on: number of bytes, and the legal range of the second one. The narrow
/// ranges exclude overlong forms, surrogates and everything beyond U+10FFFF.
struct Lead {
    std::uint8_t bytes = 0;  // 0: no character begins with this byte
    std::uint8_t second_min = 0x80;
    std::uint8_t second_max = 0xBF;
};

Lead lead_of(std::uint8_t byte) noexcept {
    if (byte < 0x80) return {.bytes = 1};
    if (byte < 0xC2) return {};
    if (byte < 0xE0) return {.bytes = 2};
    if (byte == 0xE0) return {.bytes = 3, .second_min = 0xA0};
    if (byte == 0xED) return {.bytes = 3, .second_max = 0x9F};
    if (byte < 0xF0) return {.bytes = 3};
    if (byte == 0xF0) return {.bytes = 4, .second_min = 0x90};
    if (byte < 0xF4) return {.bytes = 4};
    if (byte == 0xF4) return {.bytes = 4, .second_max = 0x8F};
    return {};
}

}  // namespace

Utf8Step utf8_step(std::string_view text, std::size_t at) noexcept {
    auto first = static_cast<std::uint8_t>(text[at]);
    if (first < 0x80) return {Utf8Step::Kind::character, 1, first};
    Lead lead = lead_of(first);
    if (lead.bytes == 0) return {Utf8Step::Kind::ill_formed, 1, 0};

    // The lead byte carries 7 - bytes payload bits.
    char32_t code_point = first & (0x7FU >> lead.bytes);
    std::uint8_t min = lead.second_min;
    std::uint8_t max = lead.second_max;
    for (std::uint8_t i = 1; i < lead.bytes; ++i) {
        if (at + i >= text.size()) return {Utf8Step::Kind::incomplete, i, 0};
        auto byte = static_cast<std::uint8_t>(text[at + i]);
        if (byte < min || byte > max) return {Utf8Step::Kind::ill_formed, i, 0};
        code_point = (code_point << 6U) | (byte & 0x3FU);
        min = 0x80;
        max = 0xBF;
    }
    return {Utf8Step::Kind::character, lead.bytes, code_point};
}

std::optional<std::size_t> first_invalid_utf8(std::string_view text) noexcept {
    for (std::size_t at = 0; at < text.size();) {
        Utf8Step step = utf8_step(text, at);
        if (step.kind != Utf8Step::Kind::character) return at;
        at += step.bytes;
    }
    return std::nullopt;
}

}  // namespace k3::tokenizer
