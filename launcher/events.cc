#include "launcher/events.h"

#include <fmt/format.h>
#include <unistd.h>

#include <string>

namespace k3::launcher {

namespace {

void write_all(std::string_view text) {
    while (!text.empty()) {
        ssize_t wrote = ::write(STDERR_FILENO, text.data(), text.size());
        if (wrote <= 0) return;  // nobody is left to be told
        text.remove_prefix(static_cast<std::size_t>(wrote));
    }
}

}  // namespace

void EventLog::print(std::string_view line) { write_all(fmt::format("k3pipe: {}\n", line)); }

void EventLog::forward(std::string_view stage, std::string_view line) const {
    write_all(fmt::format("{}| {}\n", stage, line));
}

}  // namespace k3::launcher
