#pragma once
// Ctrl-C and its relatives as something to ask for, not to be hit by.

#include <utility>

#include "common/base/fd.h"
#include "common/base/result.h"

namespace k3::launcher {

class StopSignals {
  public:
    /// Holds nothing: came() is false.
    StopSignals() = default;

    /// Blocks SIGINT, SIGTERM and SIGHUP in this and all later threads, and ignores SIGPIPE and
    /// SIGTTOU. Must come before any thread. Error: io.
    static Result<StopSignals> take();

    /// Whether one has come, ever. Reads the descriptor: use this or a poll on fd(), not both.
    bool came();
    int fd() const noexcept { return fd_.get(); }  // a signalfd

  private:
    explicit StopSignals(Fd fd) : fd_(std::move(fd)) {}

    Fd fd_;
    bool came_ = false;
};

}  // namespace k3::launcher
