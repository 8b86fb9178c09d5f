#pragma once
// Stands between a client and a service, and troubles their connections on demand while both sides
// live on: it ends them, as a network that fails for a moment does, lets nothing pass, as one whose
// packets are dropped, or passes everything late.

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "common/base/deadline.h"
#include "common/base/fd.h"

namespace k3::test {

class SocketProxy {
  public:
    /// Where clients connect, "ipc://path" or "tcp://127.0.0.1:*" (any free port), and where the
    /// service listens, "ipc://path". Failing to listen ends the test run.
    SocketProxy(const std::string& front, const std::string& back);
    ~SocketProxy();
    SocketProxy(const SocketProxy&) = delete;
    SocketProxy& operator=(const SocketProxy&) = delete;

    /// The front, with the port that was chosen.
    const std::string& endpoint() const noexcept { return endpoint_; }

    /// Ends every connection there is; new ones work.
    void cut();
    /// While it is held nothing passes in either direction, and new connections get nowhere.
    void hold(bool is_held) noexcept { is_held_ = is_held; }
    /// Everything that comes from now on passes so much later.
    void delay(std::int64_t ms) noexcept { delay_ms_ = ms; }

    /// Half of the next piece of at least `least_bytes` (not 0) from the service passes, and from
    /// then on nothing more through its connection, whose end neither side sees. Others work.
    void stall(std::size_t least_bytes) noexcept { stall_bytes_ = least_bytes; }
    std::size_t n_stalled() const noexcept { return n_stalled_; }

  private:
    struct Chunk {
        Clock::time_point due;
        std::vector<char> bytes;
    };
    struct Direction {
        bool has_ended = false;
        std::deque<Chunk> chunks;  // on their way
    };
    struct Link {
        Fd client;
        Fd service;
        Direction to_service;
        Direction to_client;
        bool is_stalled = false;
    };
    void run();
    void accept_one();
    void read_some(const Fd& from, Direction& direction) const;
    void stall_if_wanted(Link& link);
    static bool pass_on(const Fd& to, Direction& direction);

    std::string back_;
    std::string endpoint_;
    Fd listener_;
    std::vector<Link> links_;  // the thread's own
    std::atomic<bool> stop_ = false;
    std::atomic<bool> cut_ = false;
    std::atomic<bool> is_held_ = false;
    std::atomic<std::int64_t> delay_ms_ = 0;
    std::atomic<std::size_t> stall_bytes_ = 0;
    std::atomic<std::size_t> n_stalled_ = 0;
    std::thread thread_;
};

}  // namespace k3::test
