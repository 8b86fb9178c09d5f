#include "launcher/progress_line.h"

#include <fmt/format.h>
#include <unistd.h>

#include <cstdio>
#include <utility>

namespace k3::launcher {

ProgressLine::ProgressLine(std::string doing, StopSignals signals)
    : doing_(std::move(doing)),
      signals_(std::move(signals)),
      is_terminal_(::isatty(STDERR_FILENO) == 1) {}

Result<ProgressLine> ProgressLine::begin(std::string doing) {
    ASSIGN_OR_RETURN(StopSignals signals, StopSignals::take());
    return ProgressLine(std::move(doing), std::move(signals));
}

bool ProgressLine::operator()(std::uint64_t done_bytes, std::uint64_t total_bytes) {
    const int percent = total_bytes == 0
                            ? 100
                            : static_cast<int>(static_cast<double>(done_bytes) * 100.0 /
                                               static_cast<double>(total_bytes));
    if (is_terminal_ && percent != shown_)
        fmt::print(stderr, "\r{}: {:3} % of {:.1f} GB", doing_, percent,
                   static_cast<double>(total_bytes) / 1e9);
    shown_ = percent;
    return !signals_.came();
}

void ProgressLine::end() const {
    if (is_terminal_ && shown_ >= 0) fmt::print(stderr, "\r\033[K");
}

}  // namespace k3::launcher
