#pragma once
// The expert servers of a trunk as peers: meeting them, telling in which way one is in trouble,
// meeting it again when it is back.
//
// A connection that ends is known at once. For everything else there are heartbeats on a thread of
// their own, and how long calls of that server take: one is given up when its call is late
// (service_times.h) and it gives no sign of life at all, or its compute side gets nowhere. A server
// that is only slow, because its disk or its box is, goes on being waited for.
//
// One thread uses it.

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "common/base/cores.h"
#include "common/base/deadline.h"
#include "common/base/result.h"
#include "common/telemetry/counters.h"
#include "common/transport/arena.h"
#include "common/transport/channel.h"
#include "common/transport/heartbeat.h"
#include "services/trunk/expert_directory.h"
#include "services/trunk/service_times.h"

namespace k3::trunk {

inline std::int64_t ms_since(Clock::time_point begin) {
    return std::chrono::duration_cast<std::chrono::milliseconds>(Clock::now() - begin).count();
}

class ExpertServers {
  public:
    /// Of silence besides the deadline of a call. Pings leave every 250 ms, so a server that is
    /// frozen is given up 2 s and the deadline later at most.
    static constexpr std::int64_t kSilenceMs = 1800;
    /// Without any progress of the side that computes, its connection being alive; and at least
    /// kStuckDeadlines times the deadline of the call.
    static constexpr std::int64_t kStuckMs = 10'000;
    static constexpr std::int64_t kStuckDeadlines = 4;

    struct Options {
        ExpertDirectory::Needs needs;
        std::vector<std::string> endpoints;
        std::uint64_t run_id = 0;
        std::size_t max_rows = 0;      // of one step
        std::int64_t wait_ms = 30000;  // for a server that is silent while connecting
        bool use_shm = true;           // where the server can
        std::shared_ptr<const transport::CurveKeys> keys;  // for servers on tcp
        bool fast_lane = true;      // where the server has one, on this box; needs use_shm
        std::int64_t spin_us = -1;  // in a fast lane, before sleeping; -1: if cores are idle
        std::int64_t stuck_ms = kStuckMs;
        CoreUse cores;                   // of this process
        std::function<bool()> stopping;  // asked while waiting; null: never
        /// Told the names of those without whom some expert is held by nobody; empty: it has one
        /// again. Null: nobody.
        std::function<void(const std::string& servers)> on_waiting;
    };
    /// Errors: invalid_argument (an endpoint, too many of them), resource_exhausted, io.
    static Result<std::unique_ptr<ExpertServers>> create(Options options,
                                                         telemetry::Counters& counters);

    /// As ExpertClient::connect.
    Status connect();
    void set_stopping(std::function<bool()> stopping) { options_.stopping = std::move(stopping); }
    /// Error: cancelled.
    Status stop_if_asked() const;

    /// A call that waits for its answer.
    struct Waiting {
        Clock::time_point sent_at;
        std::int64_t deadline_ms = 0;
        std::string what;  // "5 picks of layer 3"
    };

    struct Peer {
        std::unique_ptr<transport::Channel> channel;
        ServiceTimes times;
        bool up = false;
        bool is_heard = false;         // the heartbeat has an answer of it too
        Clock::time_point greeted_at;  // when it was found to be up
        bool reads_our_arena = false;
        bool arena_is_readable = false;  // its arena, by us
        std::uint64_t n_lane_sends = 0;  // of its channel, as counted so far
        std::uint64_t owed_call = 0;     // on its channel; replicas have answered it; 0: none
        Waiting owed;                    // that call
        // While it is down.
        std::string trouble;           // how it was lost, for sentences
        std::optional<Error> refusal;  // why the one that came back is not used
        std::uint64_t refused = 0;     // its instance
        std::uint64_t stuck = 0;       // instance that got nowhere; 0: it was lost otherwise
        Clock::time_point lost_at;
        Clock::time_point next_try;
    };
    std::size_t size() const noexcept { return peers_.size(); }
    Peer& operator[](std::size_t server) noexcept { return peers_[server]; }
    ExpertDirectory& directory() noexcept { return directory_; }
    transport::Arena* arena() noexcept { return arena_.get(); }  // rows of calls; null: inline only
    transport::ArenaReader& reader() noexcept { return reader_; }
    /// Bit s: server s can be called.
    std::uint64_t available() const noexcept;
    /// Bit s: server s owes the answer of a call that others have answered meanwhile.
    std::uint64_t indebted() const noexcept;
    /// Looks whether such answers have come, and loses servers of which verdict() says so.
    void collect_debts();

    /// Loses those that are known to be gone and greets those that are back. Next to nothing while
    /// nothing has happened. `patience_ms`: for the answer of one that is back.
    void refresh(std::int64_t patience_ms);
    /// Until something may have happened to any of them, `ms` at most.
    void wait_for_news(std::int64_t ms) const;

    /// Why a server is to be given up, as `unavailable`; nothing as long as there is hope.
    std::optional<Error> verdict(std::size_t server, const Waiting& call);
    /// A line about a call that is late, now and then.
    void tell_late(std::size_t server, const Waiting& call);
    /// Why a server is to be given up that takes no call, which is `error` to begin with; nothing
    /// if only the queue towards it is full: of a slow connection that is no wonder, and of a
    /// server in trouble not the cause.
    std::optional<Error> why_unsent(std::size_t server, const Waiting& call, Error error);
    void lose(std::size_t server, const Error& error);
    /// "experts-0 (...), which has closed the connection": those that are down, and who came back
    /// without experts that nobody else has.
    std::string absent() const;
    /// Why nobody at all holds an expert any more: one came back and was refused.
    std::optional<Error> refusal() const;

  private:
    ExpertServers(Options options, telemetry::Counters& counters);
    Status greet(std::size_t server, Deadline deadline);
    void try_again(std::size_t server, std::int64_t patience_ms);
    bool is_worth_greeting(const Peer& peer, const transport::Vitals& vitals) const;
    void choose_spinning();
    void say_who_is_missing() const;
    void tell_coverage();

    Options options_;
    ExpertDirectory directory_;
    std::unique_ptr<transport::Arena> arena_;
    transport::ArenaReader reader_;
    std::vector<Peer> peers_;
    std::unique_ptr<transport::Heartbeat> heartbeat_;
    std::uint64_t seen_news_ = 0;
    bool is_covered_ = true;  // as last told
    Clock::time_point told_late_{};

    std::atomic<std::uint64_t>& n_up_;
    std::atomic<std::uint64_t>& n_losses_;
    std::atomic<std::uint64_t>& n_silent_;
    std::atomic<std::uint64_t>& n_stuck_;
};

}  // namespace k3::trunk
