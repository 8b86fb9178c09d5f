#include "services/tokenizer/json.h"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <cmath>
#include <nlohmann/json.hpp>
#include <unordered_map>

#include "services/tokenizer/utf8.h"

namespace k3::tokenizer {

namespace {

constexpr const char* kSendJson = "send one JSON text as docs/chat.md describes";

/// A double as Python's repr() prints it: the shortest digits that read back equal, in positional
/// notation for decimal exponents -4 to 15, else with an exponent of at least two digits.
std::string python_float(double value) {
    char buffer[40];
    auto end =
        std::to_chars(buffer, buffer + sizeof buffer, value, std::chars_format::scientific).ptr;
    std::string_view text(buffer, static_cast<std::size_t>(end - buffer));
    std::string sign(text.starts_with('-') ? "-" : "");
    text.remove_prefix(sign.size());
    std::size_t e = text.find('e');
    std::string digits(text.substr(0, 1));
    if (e > 2) digits += text.substr(2, e - 2);
    int exponent = 0;  // of the first digit
    std::string_view exponent_text = text.substr(text[e + 1] == '+' ? e + 2 : e + 1);
    std::from_chars(exponent_text.data(), exponent_text.data() + exponent_text.size(), exponent);

    if (exponent < -4 || exponent >= 16) {
        std::string mantissa = digits.substr(0, 1);
        if (digits.size() > 1) mantissa += "." + digits.substr(1);
        return fmt::format("{}{}e{}{:02}", sign, mantissa, exponent < 0 ? '-' : '+',
                           std::abs(exponent));
    }
    if (exponent < 0)
        return sign + "0." + std::string(static_cast<std::size_t>(-exponent - 1), '0') + digits;
    auto whole = static_cast<std::size_t>(exponent) + 1;
    if (digits.size() <= whole)
        return sign + digits + std::string(whole - digits.size(), '0') + ".0";
    return sign + digits.substr(0, whole) + "." + digits.substr(whole);
}

Json make(Json::Kind kind, std::string text = {}) {
    Json value;
    value.kind = kind;
    value.text = std::move(text);
    return value;
}

/// Keeps the last value of every key, in the place of the first.
void drop_repeated_keys(std::vector<JsonMember>& members) {
    std::vector<bool> kept(members.size());
    {
        std::unordered_map<std::string_view, std::size_t> places;  // views into `members`
        places.reserve(members.size());
        for (std::size_t i = 0; i < members.size(); ++i) {
            auto [place, first] = places.emplace(members[i].key, i);
            kept[i] = first;
            if (!first) members[place->second].value = std::move(members[i].value);
        }
    }
    std::size_t n = 0;
    for (std::size_t i = 0; i < members.size(); ++i) {
        if (!kept[i]) continue;
        if (n != i) members[n] = std::move(members[i]);
        ++n;
    }
    members.resize(n);
}

/// Receives the parser's events and builds the value; any `false` ends the parse.
class Builder : public nlohmann::json_sax<nlohmann::json> {
  public:
    explicit Builder(std::string_view what) : what_(what) {}

    bool null() override { return add({}); }
    bool boolean(bool value) override {
        Json made = make(Json::Kind::boolean);
        made.boolean = value;
        return add(std::move(made));
    }
    bool number_integer(number_integer_t value) override { return number(std::to_string(value)); }
    bool number_unsigned(number_unsigned_t value) override { return number(std::to_string(value)); }
    bool number_float(number_float_t value, const std::string& spelling) override {
        // The parser reports integers beyond 64 bits here too; Python keeps every digit of them.
        if (spelling.find_first_of(".eE") == std::string::npos) return number(spelling);
        return number(python_float(value));
    }
    bool string(std::string& value) override {
        return add(make(Json::Kind::string, std::move(value)));
    }
    bool binary(binary_t& /*value*/) override { return false; }  // JSON text has none
    bool start_object(std::size_t /*elements*/) override { return open(Json::Kind::object); }
    bool key(std::string& value) override {
        open_.back()->members.push_back({std::move(value), {}});
        return true;
    }
    bool end_object() override {
        drop_repeated_keys(open_.back()->members);
        open_.pop_back();
        return true;
    }
    bool start_array(std::size_t /*elements*/) override { return open(Json::Kind::array); }
    bool end_array() override {
        open_.pop_back();
        return true;
    }
    bool parse_error(std::size_t position, const std::string& /*last_token*/,
                     const nlohmann::detail::exception& failure) override {
        constexpr int kNumberOverflow = 406;
        // The parser counts the bytes it has taken, the offending one (or the end) included.
        std::size_t at = position > 0 ? position - 1 : 0;
        return fail(failure.id == kNumberOverflow
                        ? fmt::format("the number that ends at byte {} is too large", at)
                        : fmt::format("not JSON at byte {}", at));
    }

    Result<Json> take() && {
        if (!error_.message.empty()) return std::move(error_);
        return std::move(root_);
    }

  private:
    bool number(std::string spelling) { return add(make(Json::Kind::number, std::move(spelling))); }
    bool add(Json value) {
        if (++n_values_ > kMaxJsonValues)
            return fail(fmt::format("more than {} JSON values", kMaxJsonValues));
        place() = std::move(value);
        return true;
    }
    bool open(Json::Kind kind) {
        if (open_.size() == kMaxJsonDepth)
            return fail(fmt::format("nested more than {} levels deep", kMaxJsonDepth));
        if (!add(make(kind))) return false;
        open_.push_back(last_);
        return true;
    }
    /// Where the next value belongs. A container does not grow while a value inside it is open, so
    /// the pointers in `open_` stay good.
    Json& place() {
        if (open_.empty()) {
            last_ = &root_;
        } else if (open_.back()->is(Json::Kind::array)) {
            last_ = &open_.back()->items.emplace_back();
        } else {
            last_ = &open_.back()->members.back().value;
        }
        return *last_;
    }
    bool fail(const std::string& sentence) {
        error_ = {ErrorCode::invalid_argument, std::string(what_) + ": " + sentence, kSendJson};
        return false;
    }

    std::string_view what_;
    Json root_;
    Json* last_ = nullptr;
    std::vector<Json*> open_;
    std::size_t n_values_ = 0;
    Error error_;
};

void write_string(std::string_view text, std::string& out) {
    out += '"';
    for (char c : text) {
        switch (c) {
            case '"':
                out += "\\\"";
                break;
            case '\\':
                out += "\\\\";
                break;
            case '\n':
                out += "\\n";
                break;
            case '\r':
                out += "\\r";
                break;
            case '\t':
                out += "\\t";
                break;
            case '\b':
                out += "\\b";
                break;
            case '\f':
                out += "\\f";
                break;
            default:
                if (static_cast<unsigned char>(c) < 0x20)
                    out += fmt::format("\\u{:04x}", static_cast<unsigned>(c));
                else
                    out += c;
        }
    }
    out += '"';
}

struct Style {
    bool sorted = false;
    std::string_view comma;
    std::string_view colon;
};

// Recursion is bounded by kMaxJsonDepth.
void write(const Json& value, const Style& style, std::string& out) {
    switch (value.kind) {
        case Json::Kind::null:
            out += "null";
            break;
        case Json::Kind::boolean:
            out += value.boolean ? "true" : "false";
            break;
        case Json::Kind::number:
            out += value.text;
            break;
        case Json::Kind::string:
            write_string(value.text, out);
            break;
        case Json::Kind::array: {
            out += '[';
            for (std::size_t i = 0; i < value.items.size(); ++i) {
                if (i > 0) out += style.comma;
                write(value.items[i], style, out);
            }
            out += ']';
            break;
        }
        case Json::Kind::object: {
            std::vector<const JsonMember*> members;
            for (const JsonMember& member : value.members) members.push_back(&member);
            // Bytes of UTF-8 sort as code points do, which is Python's order.
            if (style.sorted)
                std::sort(members.begin(), members.end(),
                          [](const JsonMember* a, const JsonMember* b) { return a->key < b->key; });
            out += '{';
            for (std::size_t i = 0; i < members.size(); ++i) {
                if (i > 0) out += style.comma;
                write_string(members[i]->key, out);
                out += style.colon;
                write(members[i]->value, style, out);
            }
            out += '}';
            break;
        }
    }
}

}  // namespace

const Json* Json::find(std::string_view key) const noexcept {
    for (const JsonMember& member : members)
        if (member.key == key) return member.value.is(Kind::null) ? nullptr : &member.value;
    return nullptr;
}

std::string_view to_string(Json::Kind kind) noexcept {
    constexpr std::string_view kNames[] = {"null",   "boolean", "number",
                                           "string", "array",   "object"};
    return kNames[static_cast<std::size_t>(kind)];
}

Result<Json> parse_json(std::string_view text, std::string_view what) {
    auto refuse = [&](std::string_view problem, std::size_t at) {
        return Error{ErrorCode::invalid_argument,
                     fmt::format("{}: {} at byte {}", what, problem, at), kSendJson};
    };
    if (auto at = first_invalid_utf8(text)) return refuse("not UTF-8", *at);
    // The parser takes a zero byte for the end and would ignore what follows.
    if (std::size_t at = text.find('\0'); at != std::string_view::npos)
        return refuse("not JSON", at);
    Builder builder(what);
    nlohmann::json::sax_parse(text.begin(), text.end(), &builder);
    return std::move(builder).take();
}

std::string to_sorted_json(const Json& value) {
    std::string out;
    write(value, {.sorted = true, .comma = ",", .colon = ":"}, out);
    return out;
}

std::string to_spaced_json(const Json& value) {
    std::string out;
    write(value, {.sorted = false, .comma = ", ", .colon = ": "}, out);
    return out;
}

}  // namespace k3::tokenizer
