#pragma once
// Signs of life of several peers, asked for on a thread of their own.
//
// Whoever computes cannot ask meanwhile, and whoever waits for one peer does not hear the others.
// So one thread has a connection of its own to every peer, pings it, and keeps what came back where
// it can be looked at without waiting. It connects again by itself, backing off, and where a
// connection stands and is silent it tries a second one: whether that is accepted tells a process
// that is stopped from a box that cannot be reached.

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "common/base/deadline.h"
#include "common/base/fd.h"
#include "common/base/result.h"
#include "common/transport/messages/control.h"
#include "common/transport/zmq_link.h"

namespace k3::transport {

/// What is known of a peer. Times end when the thread last looked: while it gets no CPU itself
/// nobody grows silent.
struct Vitals {
    /// What a new connection to a peer that does not answer meets.
    enum class Door : std::uint8_t {
        unknown,
        accepts,  // the system over there takes it: the process is stopped or starved
        refuses,  // nobody listens: the process has ended
        silent,   // nothing comes back: the network, a firewall, or a box that is off
    };
    bool answers = false;     // it has answered on the connection that stands
    bool is_foreign = false;  // likewise, in another protocol version: nothing else is known of it
    std::uint64_t instance = 0;  // of its last answer; 0: there was none, or none to be read
    msg::State state = msg::State::loading;
    bool waits_for_reads = false;
    bool is_silent = false;      // for longer than Options::silence_ms; news when it begins or ends
    std::int64_t silent_ms = 0;  // since its last sign of life, or since it was asked first
    std::int64_t stalled_ms = 0;  // since the side that computes last got on, as far as it says
    Door door = Door::unknown;
    std::chrono::steady_clock::time_point door_at;  // when the attempt that met it was begun
};

class Heartbeat {
  public:
    struct Options {
        std::vector<std::string> endpoints;  // valid ones
        std::uint64_t run_id = 0;
        std::shared_ptr<const CurveKeys> keys;  // for peers on tcp
        std::int64_t ping_ms = 250;
        std::int64_t silence_ms = 2000;
        std::int64_t doubt_ms = 1000;  // of silence, after which a second connection is tried
    };
    /// Error: io (no event can be made).
    static Result<std::unique_ptr<Heartbeat>> start(Options options);
    ~Heartbeat();
    Heartbeat(const Heartbeat&) = delete;
    Heartbeat& operator=(const Heartbeat&) = delete;

    /// Any thread, and so are the others.
    Vitals look(std::size_t peer) const;
    /// Grows with every change other than the passing of time.
    std::uint64_t n_news() const noexcept { return n_news_.load(std::memory_order_relaxed); }
    /// Until there are more news than `seen`, or the deadline.
    void wait_for_news(std::uint64_t seen, Deadline deadline) const;

  private:
    struct Peer {
        std::string endpoint;
        // The thread's own.
        std::unique_ptr<ZmqLink> link;
        std::unique_ptr<ZmqLink> second;  // a new one, while `link` is silent
        Clock::time_point opened_at;
        Clock::time_point second_opened_at;
        Clock::time_point next_open;    // of `link`, while there is none
        Clock::time_point next_second;  // likewise
        Clock::time_point next_ping;
        int n_ended = 0;         // connections in a row that ended without an answer
        int n_refusals = 0;      // attempts in a row that met nobody
        std::uint64_t work = 0;  // as it last said
        // Under the mutex.
        Vitals vitals;
        Clock::time_point heard_at;
        Clock::time_point worked_at;
    };

    explicit Heartbeat(Options options, Fd wake);
    void run();
    void note_silence(Clock::time_point now);
    Clock::time_point tend(Peer& peer, Clock::time_point now);
    void tend_link(Peer& peer, Clock::time_point now);
    void tend_second(Peer& peer, Clock::time_point now);
    void listen(Peer& peer, ZmqLink& link, bool& has_answered);
    void take_pong(Peer& peer, const msg::Pong& pong);
    void take_foreign(Peer& peer);
    void set_door(Peer& peer, Vitals::Door door, Clock::time_point begun);
    std::unique_ptr<ZmqLink> open(const Peer& peer);
    void ping(ZmqLink& link);
    std::int64_t silence_ms(const Peer& peer, Clock::time_point now) const;
    void tell_locked();

    const Options options_;
    const Fd wake_;  // readable: stop
    const ZmqContext context_;
    std::vector<Peer> peers_;
    std::uint64_t n_links_ = 0;
    std::uint64_t next_call_id_ = 1;
    std::int64_t pause_ms_ = 0;  // as long as the thread meant to sleep

    mutable std::mutex mutex_;
    mutable std::condition_variable news_;
    std::atomic<std::uint64_t> n_news_{0};
    Clock::time_point looked_at_ = Clock::now();

    std::thread thread_;
};

}  // namespace k3::transport
