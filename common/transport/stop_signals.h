#pragma once
// What the connection threads know of signals; the public side is install_stop_signals().

namespace k3::transport {

/// Readable for ever once SIGTERM or SIGINT has arrived; -1 before install_stop_signals().
int stop_signal_fd() noexcept;

/// How long a service may take to end after a signal or the end of its lifeline.
inline constexpr int kForcedExitSeconds = 3;

}  // namespace k3::transport
