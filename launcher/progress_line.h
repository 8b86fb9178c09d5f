#pragma once
// How far a long command has come: one line on a terminal, rewritten at every percent, and the
// question whether Ctrl-C has asked it to stop.

#include <cstdint>
#include <string>

#include "common/base/error.h"
#include "common/base/result.h"
#include "launcher/stop_signals.h"

namespace k3::launcher {

class ProgressLine {
  public:
    /// Takes the stop signals. `doing` begins the line: "packing". Error: io.
    static Result<ProgressLine> begin(std::string doing);

    /// False once a signal has come.
    bool operator()(std::uint64_t done_bytes, std::uint64_t total_bytes);
    /// Removes the line.
    void end() const;

  private:
    ProgressLine(std::string doing, StopSignals signals);

    std::string doing_;
    StopSignals signals_;
    bool is_terminal_ = false;
    int shown_ = -1;
};

}  // namespace k3::launcher
