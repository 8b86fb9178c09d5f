#pragma once
// Ids to text, whole or in pieces as a model produces them.
//
// One character may take several tokens, so a piece of output may end inside one. The incomplete
// tail is handed to the caller, who gives it back with the next ids: the decoder keeps no state,
// and however a sequence is split into calls, the texts add up to the same bytes.

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "common/base/result.h"
#include "services/tokenizer/vocabulary.h"

namespace k3::tokenizer {

/// Text of more bytes than this is not decoded in one call.
inline constexpr std::size_t kMaxDecodeBytes = std::size_t{8} << 20U;

struct DecodeOptions {
    bool final = false;          // no more ids follow: an incomplete tail becomes U+FFFD
    bool skip_specials = false;  // leave out special tokens that the vocabulary marks so
};

struct DecodedText {
    std::string text;     // well-formed UTF-8
    std::string pending;  // at most 3 bytes that may still become a character; empty when final
};

/// Immutable: any number of threads may use it. Borrows the vocabulary.
class Decoder {
  public:
    explicit Decoder(const Vocabulary& vocabulary) : vocabulary_(vocabulary) {}

    /// The bytes the ids stand for, whatever they are.
    /// Errors: invalid_argument (an id outside the vocabulary: the id, its place and the size),
    /// resource_exhausted (more than kMaxDecodeBytes).
    Result<std::string> bytes_of(std::span<const std::uint32_t> ids, bool skip_specials) const;

    /// `pending` is what the previous call of the stream returned, at first empty. Bytes that can
    /// never become a character come out as U+FFFD at once, one for each maximal subpart.
    /// Errors: as bytes_of(); invalid_argument if `pending` is longer than 3 bytes.
    Result<DecodedText> decode(std::string_view pending, std::span<const std::uint32_t> ids,
                               const DecodeOptions& options) const;

  private:
    const Vocabulary& vocabulary_;
};

}  // namespace k3::tokenizer
