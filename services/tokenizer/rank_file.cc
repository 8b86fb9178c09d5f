#include "services/tokenizer/rank_file.h"

#include <fmt/format.h>

#include <array>
#include <charconv>
#include <cstdint>
#include <optional>
#include <unordered_map>

namespace k3::tokenizer {

namespace {

constexpr const char* kFetchAgain = "fetch the file again from where the checkpoint came from";

struct Line {
    std::string token;
    std::uint32_t rank = 0;
    std::size_t number = 0;  // of the line, from 1
};

int base64_value(char c) noexcept {
    if (c >= 'A' && c <= 'Z') return c - 'A';
    if (c >= 'a' && c <= 'z') return c - 'a' + 26;
    if (c >= '0' && c <= '9') return c - '0' + 52;
    if (c == '+') return 62;
    if (c == '/') return 63;
    return -1;
}

/// Strict: padded to whole groups, and no bits set that no byte receives.
std::optional<std::string> decode_base64(std::string_view text) {
    if (text.empty() || text.size() % 4 != 0) return std::nullopt;
    std::size_t padding = text.ends_with("==") ? 2 : text.ends_with('=') ? 1 : 0;
    std::string bytes;
    bytes.reserve(text.size() / 4 * 3);
    std::uint32_t bits = 0;
    int n_bits = 0;
    for (char c : text.substr(0, text.size() - padding)) {
        int value = base64_value(c);
        if (value < 0) return std::nullopt;
        bits = (bits << 6U) | static_cast<std::uint32_t>(value);
        n_bits += 6;
        if (n_bits < 8) continue;
        n_bits -= 8;
        bytes.push_back(static_cast<char>((bits >> static_cast<unsigned>(n_bits)) & 0xFFU));
    }
    if ((bits & ((1U << static_cast<unsigned>(n_bits)) - 1U)) != 0) return std::nullopt;
    return bytes;
}

Error bad_line(const std::string& file, std::size_t number, std::string_view what) {
    return {ErrorCode::corrupt, fmt::format("{}, line {}: {}", file, number, what), kFetchAgain};
}

/// At most the first 40 characters of what may be a damaged line, safe to print.
std::string shown(std::string_view text) {
    std::string out;
    for (char c : text.substr(0, 40)) out += c >= ' ' && c <= '~' ? c : '?';
    return text.size() > 40 ? out + "..." : out;
}

Result<Line> parse_line(std::string_view line, std::size_t number, const std::string& file) {
    std::size_t space = line.find(' ');
    if (space == std::string_view::npos)
        return bad_line(file, number,
                        fmt::format("no space between token and rank in \"{}\"", shown(line)));
    std::string_view rank_text = line.substr(space + 1);
    Line parsed{.token = {}, .rank = 0, .number = number};
    const char* end = rank_text.data() + rank_text.size();
    auto [stop, failure] = std::from_chars(rank_text.data(), end, parsed.rank);
    if (failure != std::errc() || stop != end)
        return bad_line(file, number, fmt::format("\"{}\" is not a rank", shown(rank_text)));
    std::optional<std::string> token = decode_base64(line.substr(0, space));
    if (!token)
        return bad_line(file, number,
                        fmt::format("\"{}\" is not base64", shown(line.substr(0, space))));
    parsed.token = std::move(*token);
    return parsed;
}

Result<std::vector<Line>> parse_lines(std::string_view text, const std::string& file) {
    std::vector<Line> lines;
    std::size_t number = 0;
    while (!text.empty()) {
        ++number;
        std::size_t end = text.find('\n');
        std::string_view line = text.substr(0, end);
        text.remove_prefix(end == std::string_view::npos ? text.size() : end + 1);
        if (line.ends_with('\r')) line.remove_suffix(1);
        if (line.empty()) continue;
        ASSIGN_OR_RETURN(Line parsed, parse_line(line, number, file));
        lines.push_back(std::move(parsed));
    }
    return lines;
}

/// Each token once, each byte a token.
Status check_tokens(const std::vector<Line>& lines, const std::string& file) {
    std::unordered_map<std::string_view, std::size_t> seen;  // token -> line
    seen.reserve(lines.size());
    for (const Line& line : lines) {
        auto [first, inserted] = seen.emplace(line.token, line.number);
        if (!inserted)
            return bad_line(file, line.number,
                            fmt::format("the same token as on line {}", first->second));
    }
    for (unsigned byte = 0; byte < 256; ++byte) {
        char c = static_cast<char>(byte);
        if (!seen.contains(std::string_view(&c, 1)))
            return Error{ErrorCode::corrupt,
                         fmt::format("{}: byte 0x{:02X} has no token of its own among {} lines",
                                     file, byte, lines.size()),
                         kFetchAgain};
    }
    return Status::ok();
}

}  // namespace

Result<std::vector<std::string>> parse_rank_file(std::string_view text, const std::string& file) {
    ASSIGN_OR_RETURN(std::vector<Line> lines, parse_lines(text, file));
    if (lines.empty()) return Error{ErrorCode::corrupt, file + " holds no token", kFetchAgain};

    std::vector<const Line*> by_rank(lines.size(), nullptr);
    for (const Line& line : lines) {
        if (line.rank >= lines.size())
            return bad_line(file, line.number,
                            fmt::format("rank {} leaves a gap: the {} lines must hold ranks 0 to "
                                        "{}, each once",
                                        line.rank, lines.size(), lines.size() - 1));
        const Line*& slot = by_rank[line.rank];
        if (slot != nullptr)
            return bad_line(
                file, line.number,
                fmt::format("rank {} again, first given on line {}", line.rank, slot->number));
        slot = &line;
    }
    RETURN_IF_ERROR(check_tokens(lines, file));

    std::vector<std::string> tokens(lines.size());
    for (Line& line : lines) tokens[line.rank] = std::move(line.token);
    return tokens;
}

}  // namespace k3::tokenizer
