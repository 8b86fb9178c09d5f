#include "launcher/words.h"

#include <fmt/format.h>

namespace k3::launcher {

Result<std::vector<std::string>> split_words(std::string_view text) {
    std::vector<std::string> words;
    std::string word;
    bool in_word = false;
    char quote = 0;
    for (std::size_t i = 0; i < text.size(); ++i) {
        char c = text[i];
        if (quote != 0 && c == quote) {
            quote = 0;
        } else if (quote != '\'' && c == '\\' && i + 1 < text.size()) {
            word += text[++i];
            in_word = true;
        } else if (quote != 0) {
            word += c;
        } else if (c == '\'' || c == '"') {
            quote = c;
            in_word = true;  // '' is a word too
        } else if (c == ' ' || c == '\t' || c == '\n') {
            if (in_word) words.push_back(std::move(word));
            word.clear();
            in_word = false;
        } else {
            word += c;
            in_word = true;
        }
    }
    if (quote != 0)
        return Error{
            ErrorCode::invalid_argument,
            fmt::format("'{}' has an open {} quote", text, quote == '"' ? "double" : "single"),
            "close it"};
    if (in_word) words.push_back(std::move(word));
    return words;
}

std::string shell_line(const std::vector<std::string>& words) {
    constexpr std::string_view kPlain =
        "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-+./:=,@%";
    std::string line;
    for (const std::string& word : words) {
        if (!line.empty()) line += ' ';
        if (!word.empty() && word.find_first_not_of(kPlain) == std::string::npos) {
            line += word;
            continue;
        }
        line += '\'';
        for (char c : word) {
            if (c == '\'')
                line += "'\\''";
            else
                line += c;
        }
        line += '\'';
    }
    return line;
}

bool is_legal_name(std::string_view name) noexcept {
    constexpr std::string_view kLegal =
        "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-";
    return !name.empty() && name.size() <= 40 &&
           name.find_first_not_of(kLegal) == std::string_view::npos;
}

}  // namespace k3::launcher
