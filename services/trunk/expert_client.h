#pragma once
// The trunk's side of the conversation with expert servers.
//
// Per layer every server that holds picked experts gets one call with the rows it needs (several
// if it takes fewer rows at a time) and answers with partial sums. Calls are pure, so whatever goes
// wrong on the way is mended by asking again: a server that is gone is replaced by a replica if
// there is one, or greeted anew until it is back; a shared-memory slot that was overwritten is
// asked for once more inside the message. Where a server shares the box, calls take its fast lane
// (common/transport/lane_link.h). What the server itself reports as wrong (a corrupt
// expert) is passed on.
//
// One thread uses it.

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "common/base/cores.h"
#include "common/base/deadline.h"
#include "common/base/result.h"
#include "common/telemetry/counters.h"
#include "common/transport/arena.h"
#include "common/transport/channel.h"
#include "services/trunk/expert_backend.h"
#include "services/trunk/expert_directory.h"

namespace k3::trunk {

class ExpertClient final : public ExpertBackend {
  public:
    struct Options {
        ExpertDirectory::Needs needs;
        std::vector<std::string> endpoints;
        std::uint64_t run_id = 0;
        std::uint32_t top_k = 0;
        std::size_t max_rows = 0;        // of one step
        std::int64_t wait_ms = 30000;    // for a server that is gone
        std::int64_t call_ms = 600000;   // for one call to a server that shows signs of life
        bool use_shm = true;             // where the server can
        bool fast_lane = true;           // where the server has one, on this box; needs use_shm
        std::int64_t spin_us = -1;       // in a fast lane, before sleeping; -1: if cores are idle
        CoreUse cores;                   // of this process
        std::function<bool()> stopping;  // asked while waiting; null: never
    };
    /// Adds its counters to `counters`.
    /// Errors: invalid_argument (an endpoint, too many of them), resource_exhausted.
    static Result<std::unique_ptr<ExpertClient>> create(Options options,
                                                        telemetry::Counters& counters);

    /// Greets all servers and checks that they fit and hold every expert. A server that is loading
    /// is waited for as long as it says so, one that is silent for wait_ms.
    /// Errors: incompatible (also: an expert is held by nobody), unavailable (silent), cancelled.
    Status connect();

    /// Replaces Options::stopping.
    void set_stopping(std::function<bool()> stopping) { options_.stopping = std::move(stopping); }

    void prefetch(const Routing& routing) noexcept override;
    Status start(const Routing& routing, std::span<const float> latent) override;
    Status finish(std::span<std::int64_t> sums) override;

    std::string failed_service() const override { return failed_service_; }

  private:
    struct Peer {
        std::unique_ptr<transport::Channel> channel;
        bool up = false;
        bool reads_our_arena = false;
        bool arena_is_readable = false;  // its arena, by us
        std::uint64_t n_lane_sends = 0;  // of its channel, as counted so far
        Clock::time_point next_try;      // while it is down and nothing waits for it
    };
    struct Call {
        std::size_t server = 0;
        std::uint64_t id = 0;
        bool is_open = false;              // a reply may still come
        bool is_inline = false;            // no shared memory in either direction
        std::vector<std::uint32_t> rows;   // of the step, ascending
        std::vector<std::uint32_t> picks;  // indices into the routing, row by row
    };

    ExpertClient(Options options, telemetry::Counters& counters);

    Status greet(std::size_t server, Deadline deadline);
    void lose(std::size_t server, const Error& error);
    void try_absent_servers();
    void choose_spinning();
    std::uint64_t available() const noexcept;

    Status dispatch();
    Call& next_call(std::size_t server);
    Status send(Call& call);
    Status send_or_lose(Call& call);
    Status collect(Call& call, std::span<std::int64_t> sums);
    Result<transport::Reply> wait(const Call& call);
    Status add(const Call& call, transport::Reply reply, std::span<std::int64_t> sums);
    Status recover();
    Status give_up(Error error);
    Status stop_if_asked() const;
    Error still_gone() const;

    Options options_;
    ExpertDirectory directory_;
    std::unique_ptr<transport::Arena> arena_;  // rows of calls; null: inline only
    transport::ArenaReader reader_;
    std::vector<Peer> peers_;
    std::string failed_service_;

    // Of the current layer.
    Routing routing_;
    std::span<const float> latent_;
    std::size_t latent_size_ = 0;
    std::vector<bool> is_pending_;      // [picks]: not with a server
    std::vector<std::uint8_t> chosen_;  // [picks]: whom dispatch gives it to
    std::vector<Call> calls_;           // the first n_calls_ are in use; kept for their memory
    std::size_t n_calls_ = 0;
    std::vector<float> rows_;       // [max_rows, latent_size], gathered for one call
    std::int64_t patience_ms_ = 0;  // left for servers that are gone
    int n_rounds_ = 0;

    std::atomic<std::uint64_t>& n_sent_;
    std::atomic<std::uint64_t>& n_lane_;
    std::atomic<std::uint64_t>& n_repeated_;
    std::atomic<std::uint64_t>& n_losses_;
    std::atomic<std::uint64_t>& n_stale_;
    std::atomic<std::uint64_t>& sent_bytes_;
    std::atomic<std::uint64_t>& received_bytes_;
    std::atomic<std::uint64_t>& server_compute_ns_;
    std::atomic<std::uint64_t>& server_read_ns_;
};

}  // namespace k3::trunk
