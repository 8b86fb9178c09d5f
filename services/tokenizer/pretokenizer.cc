#include "services/tokenizer/pretokenizer.h"

#include <unicode/uchar.h>
#include <unicode/uscript.h>

#include "services/tokenizer/utf8.h"

namespace k3::tokenizer {

namespace {

// What the pattern asks about a character, as bits.
constexpr unsigned kHan = 1U << 0U;      // \p{Han}: the Script property, not Script_Extensions
constexpr unsigned kLetter = 1U << 1U;   // \p{L}
constexpr unsigned kNumber = 1U << 2U;   // \p{N}
constexpr unsigned kSpace = 1U << 3U;    // \s: White_Space
constexpr unsigned kNewline = 1U << 4U;  // \r or \n
constexpr unsigned kUpper = 1U << 5U;    // [\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]
constexpr unsigned kLower = 1U << 6U;    // [\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]

std::uint8_t classify(char32_t code_point) {
    auto c = static_cast<UChar32>(code_point);
    unsigned classes = 0;
    UErrorCode failure = U_ZERO_ERROR;
    bool han = uscript_getScript(c, &failure) == USCRIPT_HAN;
    if (han) classes |= kHan;
    if (u_hasBinaryProperty(c, UCHAR_WHITE_SPACE) != 0) classes |= kSpace;
    if (code_point == '\r' || code_point == '\n') classes |= kNewline;

    std::uint32_t category = U_GET_GC_MASK(c);
    if ((category & U_GC_L_MASK) != 0) classes |= kLetter;
    if ((category & U_GC_N_MASK) != 0) classes |= kNumber;
    constexpr std::uint32_t kCaseless = U_GC_LM_MASK | U_GC_LO_MASK | U_GC_M_MASK;
    if (!han && (category & (U_GC_LU_MASK | U_GC_LT_MASK | kCaseless)) != 0) classes |= kUpper;
    if (!han && (category & (U_GC_LL_MASK | kCaseless)) != 0) classes |= kLower;
    return static_cast<std::uint8_t>(classes);
}

/// Python's str.isspace(), which the released code uses for runs: White_Space and four separators.
bool is_python_space(char32_t code_point) {
    if (code_point < 0x80)
        return code_point == ' ' || (code_point >= 0x09 && code_point <= 0x0D) ||
               (code_point >= 0x1C && code_point <= 0x1F);
    return u_hasBinaryProperty(static_cast<UChar32>(code_point), UCHAR_WHITE_SPACE) != 0;
}

constexpr std::size_t kNoMatch = static_cast<std::size_t>(-1);

struct Character {
    std::uint8_t classes = 0;
    std::uint8_t bytes = 0;  // 0: the end of the text
    bool has(unsigned any_of) const noexcept { return (classes & any_of) != 0; }
};

/// One pass over a text. Every match_* function returns where its alternative's match from `at`
/// ends, or kNoMatch. A function may look further than its match reaches, but what it leaves
/// belongs to one class and is taken whole by the next match: the pass stays linear.
class Scanner {
  public:
    Scanner(std::string_view text, const std::vector<std::uint8_t>& classes)
        : text_(text), classes_(classes) {}

    std::size_t next(std::size_t at) const {
        Character first = peek(at);
        if (first.has(kHan)) return run(at, [](Character c) { return c.has(kHan); });
        if (std::size_t end = match_word(at, first); end != kNoMatch) return end;
        if (first.has(kNumber)) return match_numerals(at);
        if (std::size_t end = match_punctuation(at, first); end != kNoMatch) return end;
        return match_space(at);
    }

  private:
    Character peek(std::size_t at) const {
        if (at >= text_.size()) return {};
        Utf8Step step = utf8_step(text_, at);
        std::uint8_t classes = step.code_point < classes_.size() ? classes_[step.code_point]
                                                                 : classify(step.code_point);
        return {classes, step.bytes};
    }

    /// The end of the longest run of characters that satisfy `wanted` (which the end does not).
    template <typename Wanted>
    std::size_t run(std::size_t at, Wanted wanted) const {
        for (Character c = peek(at); c.bytes != 0 && wanted(c); c = peek(at)) at += c.bytes;
        return at;
    }

    // Alternatives 2 and 3: an optional character that is neither letter, numeral nor line break,
    // upper* lower+ (or upper+ lower*), an optional contraction. The optional character is tried
    // first; a combining mark can be it or the beginning of the word.
    std::size_t match_word(std::size_t at, Character first) const {
        bool lead = first.bytes != 0 && !first.has(kNewline | kLetter | kNumber);
        std::size_t end = lead ? match_upper_lower(at + first.bytes) : kNoMatch;
        if (end == kNoMatch) end = match_upper_lower(at);
        if (end == kNoMatch && lead) end = match_uppers(at + first.bytes);
        if (end == kNoMatch) end = match_uppers(at);
        return end == kNoMatch ? end : skip_contraction(end);
    }

    /// upper* lower+. Many characters are both. If nothing lower follows the run of uppers, they
    /// give back characters down to the last one that is also lower, and lower+ is that one.
    std::size_t match_upper_lower(std::size_t at) const {
        std::size_t last_lower_end = kNoMatch;
        Character c = peek(at);
        for (; c.has(kUpper); c = peek(at)) {
            at += c.bytes;
            if (c.has(kLower)) last_lower_end = at;
        }
        if (!c.has(kLower)) return last_lower_end;
        return run(at, [](Character d) { return d.has(kLower); });
    }

    /// upper+ lower*.
    std::size_t match_uppers(std::size_t at) const {
        if (!peek(at).has(kUpper)) return kNoMatch;
        at = run(at, [](Character c) { return c.has(kUpper); });
        return run(at, [](Character c) { return c.has(kLower); });
    }

    /// 's 't 're 've 'm 'll 'd in any case, by Unicode simple folding: U+017F is an s too.
    std::size_t skip_contraction(std::size_t at) const {
        std::string_view rest = text_.substr(at, 3);
        if (rest.size() < 2 || rest[0] != '\'') return at;
        if (rest.substr(1) == "\xC5\xBF") return at + 3;
        auto lower = [&](std::size_t i) {
            return i < rest.size() && rest[i] >= 'A' && rest[i] <= 'Z'
                       ? static_cast<char>(rest[i] + ('a' - 'A'))
                       : (i < rest.size() ? rest[i] : '\0');
        };
        char one = lower(1);
        char two = lower(2);
        if (one == 's' || one == 't' || one == 'm' || one == 'd') return at + 2;
        if ((one == 'r' || one == 'v') && two == 'e') return at + 3;
        return one == 'l' && two == 'l' ? at + 3 : at;
    }

    // Alternative 4.
    std::size_t match_numerals(std::size_t at) const {
        for (int n = 0; n < 3; ++n) {
            Character c = peek(at);
            if (!c.has(kNumber)) break;
            at += c.bytes;
        }
        return at;
    }

    // Alternative 5: an optional space, then anything that is neither space, letter nor numeral
    // (Han symbols and marks included), then line breaks.
    std::size_t match_punctuation(std::size_t at, Character first) const {
        auto punctuation = [](Character c) { return !c.has(kSpace | kLetter | kNumber); };
        std::size_t from = text_[at] == ' ' ? at + first.bytes : at;
        std::size_t end = run(from, punctuation);
        if (end == from) return kNoMatch;
        return run(end, [](Character c) { return c.has(kNewline); });
    }

    // Alternatives 6 to 8, on a run of whitespace: up to its last line break, if it has one; else
    // all but the last character, which goes with the word that follows; else all of it.
    std::size_t match_space(std::size_t at) const {
        std::size_t after_newline = kNoMatch;
        std::size_t last = at;
        std::size_t end = at;
        for (Character c = peek(end); c.has(kSpace); c = peek(end)) {
            last = end;
            end += c.bytes;
            if (c.has(kNewline)) after_newline = end;
        }
        if (after_newline != kNoMatch) return after_newline;
        return end == text_.size() || last == at ? end : last;
    }

    std::string_view text_;
    const std::vector<std::uint8_t>& classes_;
};

}  // namespace

Pretokenizer::Pretokenizer() : classes_(0x10000) {
    for (char32_t c = 0; c < classes_.size(); ++c) classes_[c] = classify(c);
}

void Pretokenizer::split(std::string_view utf8, std::vector<std::string_view>& pieces) const {
    Scanner scanner(utf8, classes_);
    for (std::size_t at = 0; at < utf8.size();) {
        std::size_t end = scanner.next(at);
        pieces.push_back(utf8.substr(at, end - at));
        at = end;
    }
}

std::vector<std::string_view> cut_long_text(std::string_view utf8) {
    std::vector<std::string_view> stretches;
    std::size_t begin = 0;
    std::size_t characters = 0;  // of the slice
    std::size_t run = 0;         // characters of one kind before `at`
    bool in_space = false;
    for (std::size_t at = 0; at < utf8.size();) {
        Utf8Step step = utf8_step(utf8, at);
        bool space = is_python_space(step.code_point);
        bool slice_full = characters == kMaxSliceCharacters;
        run = space == in_space && !slice_full ? run + 1 : 1;
        in_space = space;
        if (slice_full || run > kMaxRunCharacters) {
            stretches.push_back(utf8.substr(begin, at - begin));
            begin = at;
            run = 1;
            if (slice_full) characters = 0;
        }
        ++characters;
        at += step.bytes;
    }
    if (begin < utf8.size()) stretches.push_back(utf8.substr(begin));
    return stretches;
}

}  // namespace k3::tokenizer
