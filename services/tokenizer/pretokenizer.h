#pragma once
// Cuts text into the pieces that byte-pair encoding works on (spec section 4.2).
//
// The released tokenizer does it with one regular expression of eight alternatives. Here it is a
// scanner over the same Unicode properties, taken from ICU: every alternative's backtracking can be
// said in a line or two, it reads UTF-8 directly, and it is linear by construction, where a regex
// engine needs a stack as deep as the longest run. A test compares it with ICU's own regex engine
// running the published pattern.

#include <cstddef>
#include <cstdint>
#include <string_view>
#include <vector>

namespace k3::tokenizer {

/// Cuts made before the pattern sees the text: slices of so many characters, and inside a slice
/// runs of whitespace or of anything else no longer than this. They change ids of pathological
/// text only, but they are part of the released tokenizer.
inline constexpr std::size_t kMaxSliceCharacters = 400'000;
inline constexpr std::size_t kMaxRunCharacters = 25'000;

/// The stretches the pattern is applied to one by one; together they are `utf8`, which must be
/// well-formed and outlive them.
std::vector<std::string_view> cut_long_text(std::string_view utf8);

/// Immutable: any number of threads may use it.
class Pretokenizer {
  public:
    Pretokenizer();

    /// Appends the pieces of one stretch; together they are `utf8`, which must be well-formed and
    /// outlive them.
    void split(std::string_view utf8, std::vector<std::string_view>& pieces) const;

  private:
    std::vector<std::uint8_t> classes_;  // of the code points below 0x10000, bits in the .cc file
};

}  // namespace k3::tokenizer
