#pragma once
// Text to ids.

#include <cstdint>
#include <string_view>
#include <vector>

#include "common/base/result.h"
#include "services/tokenizer/bpe.h"
#include "services/tokenizer/pretokenizer.h"
#include "services/tokenizer/special_matcher.h"
#include "services/tokenizer/vocabulary.h"

namespace k3::tokenizer {

/// More text in one call is refused.
inline constexpr std::size_t kMaxEncodeBytes = std::size_t{8} << 20U;

struct EncodeOptions {
    /// Text that spells a special token becomes that token. Never set for what a user wrote: it
    /// could forge the structure of a conversation.
    bool recognise_specials = false;
    /// Bytes that are not UTF-8 are kept, so that decoding gives them back: the text before them is
    /// encoded as usual, except that its last piece and everything from the first bad byte on is
    /// byte-pair encoded as one piece, and special tokens are not recognised anywhere.
    bool keep_invalid_bytes = false;
};

/// Immutable: any number of threads may use it. Borrows the vocabulary.
class Encoder {
  public:
    explicit Encoder(const Vocabulary& vocabulary);

    /// Nothing is put in front: the model has no beginning-of-text token.
    /// Errors: invalid_argument (not UTF-8: the first bad byte and its offset; too long: the bytes
    /// and the limit).
    Result<std::vector<std::uint32_t>> encode(std::string_view text,
                                              const EncodeOptions& options) const;

    /// Appends the ids of `text` as ordinary text. It must be well-formed UTF-8; `merger` is the
    /// caller's working memory.
    void append(std::string_view text, BytePairMerger& merger,
                std::vector<std::uint32_t>& ids) const;

  private:
    void append_with_specials(std::string_view text, BytePairMerger& merger,
                              std::vector<std::uint32_t>& ids) const;
    void append_broken(std::string_view text, std::size_t first_bad, BytePairMerger& merger,
                       std::vector<std::uint32_t>& ids) const;

    const Vocabulary& vocabulary_;
    Pretokenizer pretokenizer_;
    SpecialMatcher specials_;
};

}  // namespace k3::tokenizer
