#pragma once
// What systemd is told by a service that it has started: ready, how far loading is, still alive.
//
// The protocol is one datagram of lines to the socket that NOTIFY_SOCKET names (sd_notify(3)), so
// no library is needed. Without that variable nothing is said.

#include <chrono>
#include <cstdint>
#include <string>
#include <string_view>

#include "common/base/deadline.h"
#include "common/base/fd.h"

namespace k3 {

/// ready(), failed(), stopping() and loading() under one lock of the caller; alive() on one thread.
class ServiceManager {
  public:
    /// As the environment says: NOTIFY_SOCKET, and WATCHDOG_USEC unless WATCHDOG_PID is somebody
    /// else.
    static ServiceManager from_environment();
    ServiceManager() = default;

    bool is_there() const noexcept { return socket_.valid(); }

    /// Every step forward also asks for two more minutes: what takes long is not stuck.
    void loading(std::uint32_t permille, std::string_view detail);
    void ready();
    void failed(std::string_view sentence);
    void stopping();
    /// Sent twice in each period of the watchdog, however often it is called.
    void alive(Clock::time_point now);

  private:
    void say(const std::string& lines) const noexcept;

    Fd socket_;
    std::string address_;  // as sockaddr_un has it: an abstract one begins with a zero byte
    std::chrono::microseconds alive_every_{0};  // 0: nobody watches
    Clock::time_point alive_at_{};
    Clock::time_point told_at_{};
    std::string told_;
};

}  // namespace k3
