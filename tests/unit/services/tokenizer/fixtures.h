#pragma once
// What several tests of the tokenizer need: the golden vocabularies, their cases, random text.

#include <cstdint>
#include <nlohmann/json.hpp>
#include <random>
#include <string>
#include <string_view>
#include <vector>

#include "services/tokenizer/vocabulary.h"

namespace k3::test {

/// tests/golden/NAME, parsed. Fails the test run at once if it cannot be read.
nlohmann::ordered_json golden_json(const std::string& name);

/// vocab_size of the config.json in `directory`.
std::uint32_t vocab_size_of(const std::filesystem::path& directory);

tokenizer::Vocabulary tiny_vocabulary();  // 512 ranks, of tiny-k3
tokenizer::Vocabulary demo_vocabulary();  // 2,048 ranks, of demo-k3

std::string from_base64(std::string_view text);
std::string from_hex(std::string_view text);

/// Well-formed text of `n` characters that stress the pattern: letters of every case and script,
/// marks, numerals, Han symbols, all kinds of white space, apostrophes.
std::string random_text(std::mt19937_64& random, std::size_t n);
std::string random_bytes(std::mt19937_64& random, std::size_t n);

void append_utf8(char32_t code_point, std::string& out);
std::string repeat(std::string_view unit, std::size_t n);

}  // namespace k3::test
