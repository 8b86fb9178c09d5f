#pragma once
// Stop strings of one request: they may span tokens, so text that could still become one is held
// back until it cannot.
//
// The result does not depend on how the text is cut into tokens: it is as if it arrived character
// by character, so of several stop strings the one that is complete first wins, and of those
// complete at the same character the longest.

#include <cstddef>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace k3::gateway {

class StopStrings {
  public:
    StopStrings() = default;
    /// None of them empty; whole UTF-8 characters, like the text.
    explicit StopStrings(std::vector<std::string> strings);

    struct Output {
        std::string text;                    // certain now; whole characters
        std::optional<std::string> matched;  // the stop string that ends the text here
    };
    /// Takes the next piece of text. After a match nothing more may be pushed.
    Output push(std::string_view text);
    /// What was held back, when the text ends for another reason.
    std::string flush();

  private:
    std::vector<std::string> strings_;
    std::string held_;  // a proper prefix of a stop string, or empty
};

}  // namespace k3::gateway
