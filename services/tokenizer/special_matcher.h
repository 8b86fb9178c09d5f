#pragma once
// Finds spellings of special tokens in text, for callers who ask for it.

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string_view>
#include <vector>

#include "services/tokenizer/vocabulary.h"

namespace k3::tokenizer {

/// Immutable: any number of threads may use it. Borrows the vocabulary.
class SpecialMatcher {
  public:
    explicit SpecialMatcher(const Vocabulary& vocabulary);

    struct Match {
        std::size_t begin = 0;
        std::size_t bytes = 0;
        std::uint32_t id = 0;
    };
    /// The first spelling at or after `from`; the longest of those that begin there.
    std::optional<Match> find(std::string_view text, std::size_t from) const;

  private:
    struct Spelling {
        std::string_view text;
        std::uint32_t id = 0;
    };
    std::optional<Match> longest_at(std::string_view text, std::size_t at) const;

    std::vector<Spelling> spellings_;      // sorted
    std::array<bool, 256> begins_with_{};  // bytes that some spelling begins with
};

}  // namespace k3::tokenizer
