#include "tests/unit/services/tokenizer/fixtures.h"

#include <doctest/doctest.h>

#include <array>
#include <fstream>
#include <iterator>

#include "tests/support/golden.h"

namespace k3::test {

namespace {

nlohmann::ordered_json read_json(const std::filesystem::path& path) {
    std::ifstream file(path, std::ios::binary);
    REQUIRE_MESSAGE(file, "cannot read ", path.string());
    return nlohmann::ordered_json::parse(file);
}

tokenizer::Vocabulary load(const std::filesystem::path& directory) {
    auto vocabulary = tokenizer::Vocabulary::load(directory, vocab_size_of(directory));
    if (!vocabulary) FAIL(vocabulary.error().sentence());
    return std::move(vocabulary).value();
}

}  // namespace

nlohmann::ordered_json golden_json(const std::string& name) {
    return read_json(golden_dir() / name);
}

std::uint32_t vocab_size_of(const std::filesystem::path& directory) {
    return read_json(directory / "config.json")
        .at("text_config")
        .at("vocab_size")
        .get<std::uint32_t>();
}

tokenizer::Vocabulary tiny_vocabulary() { return load(golden_dir() / "tiny-k3"); }
tokenizer::Vocabulary demo_vocabulary() { return load(demo_model_dir()); }

std::string from_base64(std::string_view text) {
    constexpr std::string_view kAlphabet =
        "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    std::string bytes;
    std::uint32_t bits = 0;
    unsigned n = 0;
    for (char c : text) {
        if (c == '=') break;
        bits = bits << 6U | static_cast<std::uint32_t>(kAlphabet.find(c));
        n += 6;
        if (n < 8) continue;
        n -= 8;
        bytes += static_cast<char>(bits >> n & 0xFFU);
    }
    return bytes;
}

std::string from_hex(std::string_view text) {
    std::string bytes;
    for (std::size_t i = 0; i + 1 < text.size(); i += 2)
        bytes += static_cast<char>(std::stoi(std::string(text.substr(i, 2)), nullptr, 16));
    return bytes;
}

void append_utf8(char32_t c, std::string& out) {
    auto put = [&](char32_t byte) { out += static_cast<char>(byte); };
    if (c < 0x80) {
        put(c);
    } else if (c < 0x800) {
        put(0xC0 | c >> 6U);
        put(0x80 | (c & 0x3FU));
    } else if (c < 0x10000) {
        put(0xE0 | c >> 12U);
        put(0x80 | (c >> 6U & 0x3FU));
        put(0x80 | (c & 0x3FU));
    } else {
        put(0xF0 | c >> 18U);
        put(0x80 | (c >> 12U & 0x3FU));
        put(0x80 | (c >> 6U & 0x3FU));
        put(0x80 | (c & 0x3FU));
    }
}

std::string random_text(std::mt19937_64& random, std::size_t n) {
    constexpr std::array<char32_t, 64> kTelling = {
        'a',    'b',   's',    't',     'r',     'e',     'v',     'l',    'm',    'd',    'A',
        'S',    'L',   'E',    0x17F,   '\'',    '\'',    '\'',    ' ',    ' ',    ' ',    '\n',
        '\r',   '\t',  0x85,   0xA0,    0x1680,  0x2028,  0x3000,  0x180E, 0xFEFF, 0x1C,   '1',
        '9',    0xB2,  0x2167, 0x3007,  0x660,   '.',     ',',     '!',    '-',    '_',    0x301,
        0x20DD, 0x93F, 0x939,  0x4E2D,  0x6587,  0x3005,  0x2E80,  0x303B, 0x3042, 0x30C6, 0xAC00,
        0x1C5,  0x2B0, 0xE9,   0x16FF0, 0x20000, 0x1F642, 0x1F3FD, 0xE000, 0x378};
    std::string text;
    for (std::size_t i = 0; i < n; ++i) {
        // One in eight is any character at all.
        char32_t c = kTelling[random() % kTelling.size()];
        if (random() % 8 == 0) {
            c = static_cast<char32_t>(random() % 0x30000);
            if (c >= 0xD800 && c < 0xE000) c -= 0x800;
        }
        append_utf8(c, text);
    }
    return text;
}

std::string random_bytes(std::mt19937_64& random, std::size_t n) {
    std::string bytes;
    for (std::size_t i = 0; i < n; ++i) bytes += static_cast<char>(random());
    return bytes;
}

std::string repeat(std::string_view unit, std::size_t n) {
    std::string text;
    text.reserve(unit.size() * n);
    for (std::size_t i = 0; i < n; ++i) text += unit;
    return text;
}

}  // namespace k3::test
