// Values of settings: sizes in bytes, and the name somebody may have meant.

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <cmath>
#include <iterator>
#include <optional>
#include <utility>

#include "common/base/settings.h"

namespace k3 {

namespace {

/// Insertions, deletions, replacements and swaps of neighbours that make `a` into `b`.
std::size_t edit_distance(std::string_view a, std::string_view b) {
    std::vector<std::size_t> before(b.size() + 1);
    std::vector<std::size_t> previous(b.size() + 1);
    std::vector<std::size_t> row(b.size() + 1);
    for (std::size_t j = 0; j <= b.size(); ++j) row[j] = j;
    for (std::size_t i = 1; i <= a.size(); ++i) {
        std::swap(before, previous);
        std::swap(previous, row);
        row[0] = i;
        for (std::size_t j = 1; j <= b.size(); ++j) {
            std::size_t replaced = previous[j - 1] + (a[i - 1] == b[j - 1] ? 0 : 1);
            row[j] = std::min({previous[j] + 1, row[j - 1] + 1, replaced});
            if (i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1])
                row[j] = std::min(row[j], before[j - 2] + 1);
        }
    }
    return row[b.size()];
}

struct Unit {
    std::string_view suffix;
    std::uint64_t factor;
};
constexpr Unit kUnits[] = {{"KiB", std::uint64_t{1} << 10},
                           {"MiB", std::uint64_t{1} << 20},
                           {"GiB", std::uint64_t{1} << 30},
                           {"TiB", std::uint64_t{1} << 40},
                           {"kB", 1'000},
                           {"KB", 1'000},
                           {"MB", 1'000'000},
                           {"GB", 1'000'000'000},
                           {"TB", 1'000'000'000'000},
                           {"B", 1},
                           {"", 1}};

/// `number` (digits, perhaps with a fraction) times `factor`; nothing if it is no number or too
/// large. Whole numbers stay exact, which a double would not keep above 2^53.
std::optional<std::uint64_t> scaled(std::string_view number, std::uint64_t factor) {
    const char* end = number.data() + number.size();
    std::uint64_t whole = 0;
    if (auto [at, code] = std::from_chars(number.data(), end, whole);
        code == std::errc{} && at == end) {
        if (__builtin_mul_overflow(whole, factor, &whole)) return std::nullopt;
        return whole;
    }
    double value = 0;
    auto [at, code] = std::from_chars(number.data(), end, value);
    if (code != std::errc{} || at != end) return std::nullopt;
    value *= static_cast<double>(factor);
    if (!(value >= 0 && value < 9e18)) return std::nullopt;
    return static_cast<std::uint64_t>(std::llround(value));
}

}  // namespace

Result<std::uint64_t> parse_bytes(std::string_view text) {
    std::size_t digits = std::min(text.find_first_not_of("0123456789."), text.size());
    std::string_view suffix = text.substr(digits);
    while (!suffix.empty() && suffix.front() == ' ') suffix.remove_prefix(1);
    for (const Unit& unit : kUnits)
        if (suffix == unit.suffix)
            if (auto bytes = scaled(text.substr(0, digits), unit.factor)) return *bytes;
    return Error{ErrorCode::invalid_argument, fmt::format("'{}' is not a size", text),
                 "write a number of bytes, or one with KiB, MiB, GiB, TiB, kB, MB, GB or TB"};
}

std::string format_bytes(std::uint64_t bytes) {
    static constexpr std::string_view kNames[] = {"B", "KiB", "MiB", "GiB", "TiB"};
    double value = static_cast<double>(bytes);
    std::size_t unit = 0;
    while (value >= 1024 && unit + 1 < std::size(kNames)) {
        value /= 1024;
        ++unit;
    }
    std::string digits = fmt::format("{:.2f}", value);
    digits.erase(digits.find_last_not_of('0') + 1);
    if (digits.back() == '.') digits.pop_back();
    return fmt::format("{} {}", digits, kNames[unit]);
}

std::string nearest_name(std::string_view word, std::span<const std::string> candidates) {
    std::string best;
    std::size_t best_distance = std::min<std::size_t>(4, word.size() / 2 + 1);
    for (const std::string& candidate : candidates) {
        std::size_t distance = edit_distance(word, candidate);
        if (distance < best_distance) {
            best_distance = distance;
            best = candidate;
        }
    }
    return best;
}

}  // namespace k3
