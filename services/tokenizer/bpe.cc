#include "services/tokenizer/bpe.h"

#include <algorithm>
#include <functional>

namespace k3::tokenizer {

BytePairMerger::BytePairMerger(const Vocabulary& vocabulary) : vocabulary_(vocabulary) {
    for (unsigned byte = 0; byte < 256; ++byte) {
        char c = static_cast<char>(byte);
        // Loading has made sure that every byte is a token.
        byte_ids_[byte] = vocabulary.rank_of(std::string_view(&c, 1)).value_or(0);
    }
}

void BytePairMerger::encode(std::string_view piece, std::vector<std::uint32_t>& ids) {
    if (piece.empty()) return;
    if (piece.size() <= vocabulary_.max_token_bytes()) {
        if (auto whole = vocabulary_.rank_of(piece)) {
            ids.push_back(*whole);
            return;
        }
    }
    merge_all(piece);
    for (std::uint32_t part = 0; part < piece.size(); part = parts_[part].next)
        ids.push_back(parts_[part].id);
}

void BytePairMerger::merge_all(std::string_view piece) {
    auto n = static_cast<std::uint32_t>(piece.size());
    parts_.resize(n);
    queue_.clear();
    for (std::uint32_t i = 0; i < n; ++i)
        parts_[i] = {byte_ids_[static_cast<std::uint8_t>(piece[i])], i + 1, i == 0 ? kNone : i - 1,
                     kNone};
    for (std::uint32_t i = 0; i < n; ++i) {
        parts_[i].pair_rank = rank_of_pair(piece, i);
        if (parts_[i].pair_rank != kNone)
            queue_.push_back(std::uint64_t{parts_[i].pair_rank} << 32U | i);
    }
    std::make_heap(queue_.begin(), queue_.end(), std::greater<>());

    while (!queue_.empty()) {
        std::pop_heap(queue_.begin(), queue_.end(), std::greater<>());
        auto rank = static_cast<std::uint32_t>(queue_.back() >> 32U);
        auto left = static_cast<std::uint32_t>(queue_.back());
        queue_.pop_back();
        // The pair has changed since it was proposed, or its left part is gone.
        if (parts_[left].pair_rank != rank) continue;

        std::uint32_t right = parts_[left].next;
        parts_[left].id = rank;
        parts_[left].next = parts_[right].next;
        if (parts_[right].next < n) parts_[parts_[right].next].previous = left;
        parts_[right].pair_rank = kNone;
        propose(piece, left);
        if (parts_[left].previous != kNone) propose(piece, parts_[left].previous);
    }
}

std::uint32_t BytePairMerger::rank_of_pair(std::string_view piece, std::uint32_t part) const {
    std::uint32_t right = parts_[part].next;
    if (right >= piece.size()) return kNone;
    std::size_t bytes = parts_[right].next - part;
    if (bytes > vocabulary_.max_token_bytes()) return kNone;
    return vocabulary_.rank_of(piece.substr(part, bytes)).value_or(kNone);
}

void BytePairMerger::propose(std::string_view piece, std::uint32_t part) {
    std::uint32_t rank = rank_of_pair(piece, part);
    parts_[part].pair_rank = rank;
    if (rank == kNone) return;
    queue_.push_back(std::uint64_t{rank} << 32U | part);
    std::push_heap(queue_.begin(), queue_.end(), std::greater<>());
}

}  // namespace k3::tokenizer
