#include "launcher/service_output.h"

#include <algorithm>
#include <utility>

namespace k3::launcher {

namespace {

constexpr std::size_t kMaxLine = 8192;

std::string_view next_word(std::string_view& rest) {
    std::size_t end = std::min(rest.find(' '), rest.size());
    std::string_view word = rest.substr(0, end);
    rest.remove_prefix(std::min(end + 1, rest.size()));
    return word;
}

/// "2026-11-29" with mask "dddd-dd-dd".
bool has_shape(std::string_view word, std::string_view mask) {
    if (word.size() != mask.size()) return false;
    for (std::size_t i = 0; i < word.size(); ++i) {
        bool digit = word[i] >= '0' && word[i] <= '9';
        if (mask[i] == 'd' ? !digit : word[i] != mask[i]) return false;
    }
    return true;
}

}  // namespace

OutputLine parse_line(std::string_view line) {
    OutputLine parsed;
    parsed.text = std::string(line);
    parsed.message = parsed.text;
    std::string_view rest = line;
    if (!has_shape(next_word(rest), "dddd-dd-dd") || !has_shape(next_word(rest), "dd:dd:dd.ddd"))
        return parsed;
    static constexpr std::pair<std::string_view, LineLevel> kLevels[] = {
        {"debug", LineLevel::debug},  {"info", LineLevel::info},   {"warning", LineLevel::warning},
        {"warn", LineLevel::warning}, {"error", LineLevel::error}, {"critical", LineLevel::error}};
    std::string_view level = next_word(rest);
    const auto* found = std::find_if(std::begin(kLevels), std::end(kLevels),
                                     [&](const auto& entry) { return entry.first == level; });
    if (found == std::end(kLevels)) return parsed;
    parsed.level = found->second;
    next_word(rest);  // the service's name
    if (rest.starts_with("run=")) next_word(rest);
    parsed.message = std::string(rest);
    return parsed;
}

std::vector<OutputLine> OutputReader::add(std::string_view bytes) {
    std::vector<OutputLine> lines;
    partial_ += bytes;
    std::size_t begin = 0;
    for (;;) {
        std::size_t end = partial_.find('\n', begin);
        if (end == std::string::npos && partial_.size() - begin <= kMaxLine) break;
        std::size_t length = std::min(end - begin, kMaxLine);
        lines.push_back(parse_line(std::string_view(partial_).substr(begin, length)));
        begin += length;
        if (begin == end) ++begin;
    }
    partial_.erase(0, begin);
    return lines;
}

std::vector<OutputLine> OutputReader::finish() {
    std::vector<OutputLine> lines;
    if (!partial_.empty()) lines.push_back(parse_line(partial_));
    partial_.clear();
    return lines;
}

}  // namespace k3::launcher
