#include "services/gateway/stop_strings.h"

#include <algorithm>
#include <utility>

namespace k3::gateway {

StopStrings::StopStrings(std::vector<std::string> strings) : strings_(std::move(strings)) {}

StopStrings::Output StopStrings::push(std::string_view text) {
    held_ += text;
    std::size_t best_end = std::string::npos;
    std::size_t best_start = 0;
    const std::string* matched = nullptr;
    for (const std::string& stop : strings_) {
        const std::size_t start = held_.find(stop);
        if (start == std::string::npos) continue;
        const std::size_t end = start + stop.size();
        if (matched == nullptr || end < best_end || (end == best_end && start < best_start)) {
            best_end = end;
            best_start = start;
            matched = &stop;
        }
    }
    if (matched != nullptr) {
        Output out{held_.substr(0, best_start), *matched};
        held_.clear();
        return out;
    }
    // The longest tail that a stop string could begin with.
    std::size_t n_held = 0;
    for (const std::string& stop : strings_) {
        for (std::size_t n = std::min(stop.size() - 1, held_.size()); n > n_held; --n) {
            if (held_.compare(held_.size() - n, n, stop, 0, n) == 0) n_held = n;
        }
    }
    Output out{held_.substr(0, held_.size() - n_held), std::nullopt};
    held_.erase(0, held_.size() - n_held);
    return out;
}

std::string StopStrings::flush() { return std::exchange(held_, {}); }

}  // namespace k3::gateway
