#pragma once
// Command lines as words, and words as command lines; names that can be part of a path.

#include <string>
#include <string_view>
#include <vector>

#include "common/base/result.h"

namespace k3::launcher {

/// Splits as a shell would: blanks separate, '..', ".." and \x quote. No expansion of any kind.
/// Error: invalid_argument (an open quote).
Result<std::vector<std::string>> split_words(std::string_view text);
/// The inverse: one line to paste into a shell.
std::string shell_line(const std::vector<std::string>& words);

/// Legal as a pipeline or stage name: [A-Za-z0-9_-], 1 to 40 characters.
bool is_legal_name(std::string_view name) noexcept;

}  // namespace k3::launcher
