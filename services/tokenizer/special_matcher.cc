#include "services/tokenizer/special_matcher.h"

#include <algorithm>

namespace k3::tokenizer {

SpecialMatcher::SpecialMatcher(const Vocabulary& vocabulary) {
    for (std::uint32_t id = vocabulary.n_ranks(); id < vocabulary.size(); ++id) {
        std::string_view text = vocabulary.token(id);
        spellings_.push_back({text, id});
        begins_with_[static_cast<std::uint8_t>(text.front())] = true;
    }
    std::sort(spellings_.begin(), spellings_.end(),
              [](const Spelling& a, const Spelling& b) { return a.text < b.text; });
}

std::optional<SpecialMatcher::Match> SpecialMatcher::find(std::string_view text,
                                                          std::size_t from) const {
    for (std::size_t at = from; at < text.size(); ++at) {
        if (!begins_with_[static_cast<std::uint8_t>(text[at])]) continue;
        if (auto match = longest_at(text, at)) return match;
    }
    return std::nullopt;
}

/// Narrows the sorted list by one byte after the other, so that text full of first bytes costs no
/// more than a few comparisons each.
std::optional<SpecialMatcher::Match> SpecialMatcher::longest_at(std::string_view text,
                                                                std::size_t at) const {
    std::optional<Match> match;
    auto begin = spellings_.begin();
    auto end = spellings_.end();
    for (std::size_t depth = 0; begin != end; ++depth) {
        // All of [begin, end) agree with the text so far; a complete one sorts before the others.
        if (begin->text.size() == depth) {
            match = Match{at, depth, begin->id};
            ++begin;
        }
        if (at + depth >= text.size()) break;
        char wanted = text[at + depth];
        auto less = [depth](const Spelling& s, char c) {
            return static_cast<std::uint8_t>(s.text[depth]) < static_cast<std::uint8_t>(c);
        };
        auto greater = [depth](char c, const Spelling& s) {
            return static_cast<std::uint8_t>(c) < static_cast<std::uint8_t>(s.text[depth]);
        };
        begin = std::lower_bound(begin, end, wanted, less);
        end = std::upper_bound(begin, end, wanted, greater);
    }
    return match;
}

}  // namespace k3::tokenizer
