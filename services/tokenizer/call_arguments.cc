#include "services/tokenizer/call_arguments.h"

#include <cstdint>
#include <optional>

namespace k3::tokenizer {

namespace {

void append_utf8(std::uint32_t c, std::string& out) {
    auto put = [&](std::uint32_t byte) { out += static_cast<char>(byte); };
    if (c < 0x80) {
        put(c);
    } else if (c < 0x800) {
        put(0xC0U | c >> 6U);
        put(0x80U | (c & 0x3FU));
    } else if (c < 0x10000) {
        put(0xE0U | c >> 12U);
        put(0x80U | (c >> 6U & 0x3FU));
        put(0x80U | (c & 0x3FU));
    } else {
        put(0xF0U | c >> 18U);
        put(0x80U | (c >> 12U & 0x3FU));
        put(0x80U | (c >> 6U & 0x3FU));
        put(0x80U | (c & 0x3FU));
    }
}

/// Walks over JSON text (RFC 8259). Every function returns false where the text is not JSON.
class Scanner {
  public:
    explicit Scanner(std::string_view text) : text_(text) {}

    std::size_t at() const noexcept { return at_; }

    void skip_space() {
        while (at_ < text_.size() && (text_[at_] == ' ' || text_[at_] == '\t' ||
                                      text_[at_] == '\n' || text_[at_] == '\r'))
            ++at_;
    }

    bool take(char c) {
        if (peek() != c) return false;
        ++at_;
        return true;
    }

    char peek() const { return at_ < text_.size() ? text_[at_] : '\0'; }

    /// A string in quotes; its characters are appended to `out`.
    bool string(std::string& out) {
        if (!take('"')) return false;
        while (at_ < text_.size()) {
            char c = text_[at_++];
            if (c == '"') return true;
            if (static_cast<unsigned char>(c) < 0x20) return false;
            if (c != '\\') {
                out += c;
            } else if (!escape(out)) {
                return false;
            }
        }
        return false;
    }

    /// `"key" :` with the space around it.
    bool key(std::string& out) {
        skip_space();
        if (!string(out)) return false;
        skip_space();
        return take(':');
    }

    /// Any value. Keeps the open brackets on the heap, so that depth costs no stack.
    bool value() {
        std::string open;     // brackets still to close
        std::string ignored;  // characters of strings
        for (;;) {
            skip_space();
            char c = peek();
            if (c == '{' || c == '[') {
                ++at_;
                open += c;
                skip_space();
                if (peek() != closing(c)) {
                    if (c == '{' && !key(ignored)) return false;
                    ignored.clear();
                    continue;
                }
            } else if (!scalar(ignored)) {
                return false;
            }
            // After a value: close what ends here, or go on to the next member.
            for (;;) {
                ignored.clear();
                if (open.empty()) return true;
                skip_space();
                if (take(',')) {
                    if (open.back() == '{' && !key(ignored)) return false;
                    break;
                }
                if (!take(closing(open.back()))) return false;
                open.pop_back();
            }
        }
    }

  private:
    static char closing(char bracket) { return bracket == '{' ? '}' : ']'; }

    bool scalar(std::string& ignored) {
        switch (peek()) {
            case '"':
                return string(ignored);
            case 't':
                return word("true");
            case 'f':
                return word("false");
            case 'n':
                return word("null");
            default:
                return number();
        }
    }

    bool word(std::string_view expected) {
        if (text_.substr(at_, expected.size()) != expected) return false;
        at_ += expected.size();
        return true;
    }

    bool digits() {
        std::size_t from = at_;
        while (peek() >= '0' && peek() <= '9') ++at_;
        return at_ > from;
    }

    bool number() {
        if (peek() == '-') ++at_;
        if (!take('0') && !digits()) return false;
        if (take('.') && !digits()) return false;
        if (peek() != 'e' && peek() != 'E') return true;
        ++at_;
        if (peek() == '+' || peek() == '-') ++at_;
        return digits();
    }

    std::optional<std::uint32_t> hex4() {
        if (text_.size() - at_ < 4) return std::nullopt;
        std::uint32_t value = 0;
        for (char c : text_.substr(at_, 4)) {
            value <<= 4U;
            if (c >= '0' && c <= '9')
                value |= static_cast<std::uint32_t>(c - '0');
            else if (c >= 'a' && c <= 'f')
                value |= static_cast<std::uint32_t>(c - 'a' + 10);
            else if (c >= 'A' && c <= 'F')
                value |= static_cast<std::uint32_t>(c - 'A' + 10);
            else
                return std::nullopt;
        }
        at_ += 4;
        return value;
    }

    /// What follows a backslash.
    bool escape(std::string& out) {
        constexpr std::string_view kLetters = "\"\\/bfnrt";
        constexpr std::string_view kMeanings = "\"\\/\b\f\n\r\t";
        char c = peek();
        if (std::size_t i = kLetters.find(c); c != '\0' && i != std::string_view::npos) {
            ++at_;
            out += kMeanings[i];
            return true;
        }
        if (!take('u')) return false;
        std::optional<std::uint32_t> unit = hex4();
        if (!unit) return false;
        append_utf8(complete(*unit), out);
        return true;
    }

    /// The character of a UTF-16 unit, with the escape of its other half if that follows.
    std::uint32_t complete(std::uint32_t unit) {
        constexpr std::uint32_t kReplacement = 0xFFFD;
        if (unit < 0xD800 || unit > 0xDFFF) return unit;
        if (unit > 0xDBFF || text_.substr(at_, 2) != "\\u") return kReplacement;
        std::size_t before = at_;
        at_ += 2;
        std::optional<std::uint32_t> low = hex4();
        if (low && *low >= 0xDC00 && *low <= 0xDFFF)
            return 0x10000 + ((unit - 0xD800) << 10U) + (*low - 0xDC00);
        at_ = before;
        return kReplacement;
    }

    std::string_view text_;
    std::size_t at_ = 0;
};

std::string_view type_of(char first) {
    switch (first) {
        case '"':
            return "string";
        case '{':
            return "object";
        case '[':
            return "array";
        case 't':
        case 'f':
            return "boolean";
        case 'n':
            return "null";
        default:
            return "number";
    }
}

/// Nothing if the text does not begin with a JSON object.
std::optional<std::vector<CallArgument>> scan_object(std::string_view text) {
    Scanner scanner(text);
    std::vector<CallArgument> members;
    scanner.skip_space();
    if (!scanner.take('{')) return std::nullopt;
    scanner.skip_space();
    if (scanner.take('}')) return members;
    do {
        CallArgument& member = members.emplace_back();
        if (!scanner.key(member.key)) return std::nullopt;
        scanner.skip_space();
        std::size_t begin = scanner.at();
        member.type = type_of(scanner.peek());
        if (member.type == "string") {
            if (!scanner.string(member.text)) return std::nullopt;
        } else {
            if (!scanner.value()) return std::nullopt;
            member.text = text.substr(begin, scanner.at() - begin);
        }
        scanner.skip_space();
    } while (scanner.take(','));
    if (!scanner.take('}')) return std::nullopt;
    return members;
}

}  // namespace

CallArguments arguments_of_object(const Json& object) {
    CallArguments arguments;
    for (const JsonMember& member : object.members)
        arguments.members.push_back({member.key, to_string(member.value.kind),
                                     member.value.is(Json::Kind::string)
                                         ? member.value.text
                                         : to_spaced_json(member.value)});
    return arguments;
}

CallArguments arguments_of_string(std::string_view text) {
    CallArguments arguments;
    if (auto members = scan_object(text))
        arguments.members = std::move(*members);
    else
        arguments.raw = text;
    return arguments;
}

}  // namespace k3::tokenizer
