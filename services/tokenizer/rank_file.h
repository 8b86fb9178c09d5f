#pragma once
// Reads `tiktoken.model`: lines of base64(token bytes), a space, the decimal rank.

#include <string>
#include <string_view>
#include <vector>

#include "common/base/result.h"

namespace k3::tokenizer {

/// The tokens in order of rank. The lines may come in any order, but their ranks must be 0..n-1,
/// each once, no token may be empty or occur twice, and each of the 256 bytes must be a token
/// (else some text could not be encoded at all).
/// Errors: corrupt, naming `file` and the line.
Result<std::vector<std::string>> parse_rank_file(std::string_view text, const std::string& file);

}  // namespace k3::tokenizer
