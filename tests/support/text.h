#pragma once
// What a sentence says.

#include <string_view>

namespace k3::test {

inline bool contains(std::string_view text, std::string_view part) {
    return text.find(part) != std::string_view::npos;
}

}  // namespace k3::test
