#pragma once
// How patient the supervisor is; the pipeline file sets most of it.

#include <cstddef>
#include <cstdint>
#include <memory>

#include "common/transport/curve_keys.h"

namespace k3::launcher {

struct SupervisorOptions {
    std::int64_t start_timeout_ms = 120000;  // without any progress
    std::int64_t attach_timeout_ms = 2000;   // for an attached endpoint to answer at all
    std::int64_t silence_ms = 3000;          // without an answer: lost
    std::int64_t hang_ms = 30000;            // lost for so long, and nobody holds it: killed
    std::int64_t stop_grace_ms = 2500;       // between SIGTERM and SIGKILL
    std::size_t max_restarts = 5;
    std::int64_t restart_window_ms = 60000;
    bool forward_errors = true;  // error lines of ready services; `run` reports errors itself
    // To ask stages on tcp with; null: none. Shared by the watchers.
    std::shared_ptr<const transport::CurveKeys> keys;
    int signal_fd = -1;  // a signalfd with the signals that mean stop
};

}  // namespace k3::launcher
