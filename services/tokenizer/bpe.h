#pragma once
// Byte-pair encoding of one piece (spec section 4.2).
//
// Beginning with single bytes, the adjacent pair whose concatenation has the lowest rank is merged,
// the leftmost of equals first, until no concatenation is a token. A heap of candidate pairs over a
// linked list makes that n log n: a piece may be 25,000 characters of one run, where looking for
// the lowest pair after every merge would take minutes.

#include <array>
#include <cstdint>
#include <string_view>
#include <vector>

#include "services/tokenizer/vocabulary.h"

namespace k3::tokenizer {

/// Keeps its working memory from piece to piece: one per thread. Borrows the vocabulary.
class BytePairMerger {
  public:
    explicit BytePairMerger(const Vocabulary& vocabulary);

    /// Appends the ids of `piece`, any bytes, fewer than 2^32 of them.
    void encode(std::string_view piece, std::vector<std::uint32_t>& ids);

  private:
    struct Part {
        std::uint32_t id = 0;         // the token this part is now
        std::uint32_t next = 0;       // index of the part after it; n_bytes: none
        std::uint32_t previous = 0;   // index of the part before it; kNone: none
        std::uint32_t pair_rank = 0;  // of this part and the next together; kNone: no token
    };
    static constexpr std::uint32_t kNone = 0xFFFF'FFFF;

    void merge_all(std::string_view piece);
    std::uint32_t rank_of_pair(std::string_view piece, std::uint32_t part) const;
    void propose(std::string_view piece, std::uint32_t part);

    const Vocabulary& vocabulary_;
    std::array<std::uint32_t, 256> byte_ids_{};
    std::vector<Part> parts_;           // a part sits at the index of its first byte
    std::vector<std::uint64_t> queue_;  // heap of (pair rank, part), least first
};

}  // namespace k3::tokenizer
