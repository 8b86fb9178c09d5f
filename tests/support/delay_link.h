#pragma once
// A network link with delay, jitter, loss and a rate, in user space: the kernel of a test machine
// often has no netem.
//
//   (bridge) --- k3portN ~~~ k3midN  [DelayLink]  k3boxN ~~~ eth0 --- (box)
//                      veth pair                       veth pair
//
// It carries Ethernet frames between two interfaces of the calling thread's network namespace,
// which must belong to nothing else (no bridge, no address). Frames go through packet sockets with
// their offload headers, so what the kernel hands over as one large TCP segment passes as one: a
// "frame" here is up to 64 KiB, and is lost as a whole. Every direction keeps its order: jitter
// makes gaps, never overtaking. A thread of its own sleeps until a frame arrives or is due.

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <mutex>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "common/base/deadline.h"
#include "common/base/fd.h"

namespace k3::test {

/// What a frame meets on its way; the same in both directions.
struct LinkShape {
    std::int64_t delay_us = 0;        // one way: half of the round trip
    std::int64_t jitter_us = 0;       // and up to so much more, evenly spread
    std::uint32_t loss_per_1000 = 0;  // frames
    std::uint64_t bytes_per_s = 0;    // 0: any number at once
    std::uint64_t seed = 1;           // of loss and jitter
};

class DelayLink {
  public:
    struct Counts {
        std::uint64_t n_passed = 0;
        std::uint64_t n_lost = 0;     // by the shape
        std::uint64_t n_dropped = 0;  // by a full queue (16 MiB), or an interface that was down
    };

    /// Takes both interfaces up, without answering for this machine on them. Failing to open them
    /// ends the test run.
    DelayLink(const std::string& one, const std::string& other, const LinkShape& shape);
    ~DelayLink();
    DelayLink(const DelayLink&) = delete;
    DelayLink& operator=(const DelayLink&) = delete;

    /// For frames that arrive from now on.
    void set_shape(const LinkShape& shape);
    Counts counts() const noexcept;

  private:
    struct Frame {
        Clock::time_point due;
        std::vector<std::byte> bytes;  // offload header, then Ethernet
    };
    /// From one interface to the other.
    struct Direction {
        int from = -1;
        int to = -1;
        std::deque<Frame> frames;
        std::size_t waiting_bytes = 0;
        Clock::time_point free_at{};   // the line has sent what came before
        Clock::time_point last_due{};  // of the frame in front
        std::mt19937_64 random;
    };
    void run();
    void read_all(Direction& direction);
    void enqueue(Direction& direction, std::size_t bytes);
    void send_due(Direction& direction, Clock::time_point now);

    std::array<Fd, 2> sockets_;
    std::array<Direction, 2> directions_;
    std::vector<std::byte> buffer_;
    Fd stop_;
    mutable std::mutex mutex_;
    LinkShape shape_;
    std::atomic<std::uint64_t> n_passed_ = 0;
    std::atomic<std::uint64_t> n_lost_ = 0;
    std::atomic<std::uint64_t> n_dropped_ = 0;
    std::thread thread_;
};

}  // namespace k3::test
