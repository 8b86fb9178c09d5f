#pragma once
// The trunk's side of the conversation with expert servers.
//
// Per layer every server that holds picked experts gets one call with the rows it needs (several
// if it takes fewer rows at a time) and answers with partial sums. Calls are pure, so whatever goes
// wrong on the way is mended by asking again: a server that is gone (expert_servers.h says when) is
// replaced by a replica if there is one, or waited for until it is back; a shared-memory slot that
// was overwritten is asked for once more inside the message. Where a server shares the box, calls
// take its fast lane (common/transport/lane_link.h). What the server itself reports as wrong (a
// corrupt expert) is passed on.
//
// With a hedge quantile, a call that takes longer than that share of the server's calls goes to
// replicas as well, and whoever has answered completely first is believed. Sums are exact, so it
// makes no difference to them who that is.
//
// One thread uses it.

#include <cstddef>
#include <cstdint>
#include <deque>
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
#include "services/trunk/expert_servers.h"

namespace k3::trunk {

class ExpertClient final : public ExpertBackend {
  public:
    struct Options {
        ExpertDirectory::Needs needs;
        std::vector<std::string> endpoints;
        std::uint64_t run_id = 0;
        std::uint32_t top_k = 0;
        std::size_t max_rows = 0;       // of one step
        std::int64_t wait_ms = 30000;   // for a server that is gone
        std::int64_t call_ms = 600000;  // for one call to a server that shows signs of life
        std::int64_t stuck_ms = ExpertServers::kStuckMs;
        double hedge_quantile = 0;                         // above 0, below 1: as above; 0: never
        bool use_shm = true;                               // where the server can
        std::shared_ptr<const transport::CurveKeys> keys;  // for servers on tcp
        bool fast_lane = true;           // where the server has one, on this box; needs use_shm
        std::int64_t spin_us = -1;       // in a fast lane, before sleeping; -1: if cores are idle
        CoreUse cores;                   // of this process
        std::function<bool()> stopping;  // asked while waiting; null: never
        /// As ExpertServers::Options::on_waiting.
        std::function<void(const std::string& servers)> on_waiting;
    };
    /// Adds its counters to `counters`.
    /// Errors: invalid_argument (an endpoint, too many of them), resource_exhausted.
    static Result<std::unique_ptr<ExpertClient>> create(Options options,
                                                        telemetry::Counters& counters);

    /// Greets all servers and checks that they fit and hold every expert. A server that is loading
    /// is waited for as long as it says so, one that is silent for wait_ms.
    /// Errors: incompatible (also: an expert is held by nobody), unavailable (silent), cancelled.
    Status connect() { return servers_->connect(); }

    /// Replaces Options::stopping.
    void set_stopping(std::function<bool()> stopping) {
        servers_->set_stopping(std::move(stopping));
    }

    /// To be called now and then while there is nothing to compute: who is gone is known, and told
    /// as missing, before somebody asks for something.
    void look_after_servers() { servers_->refresh(kAbsentTryMs); }

    void prefetch(const Routing& routing) noexcept override;
    Status start(const Routing& routing, std::span<const float> latent) override;
    Status finish(std::span<std::int64_t> sums) override;

    std::string failed_service() const override { return failed_service_; }

  private:
    static constexpr std::int64_t kAbsentTryMs = 20;  // for a server that is not needed right now
    static constexpr std::size_t kNoCall = ~std::size_t{0};

    struct Call {
        std::size_t server = 0;
        std::uint64_t id = 0;
        bool is_open = false;              // a reply may still come
        bool is_inline = false;            // no shared memory in either direction
        std::vector<std::uint32_t> rows;   // of the step, ascending
        std::vector<std::uint32_t> picks;  // indices into the routing, row by row
        Clock::time_point sent_at;
        bool is_told_late = false;
        std::int64_t hedge_after_ms = -1;      // -1: never
        std::size_t hedge_of = kNoCall;        // the call whose picks it has as well
        std::size_t n_hedges = 0;              // outstanding for this one
        std::optional<transport::Reply> held;  // of a hedge: the sums are added when all are there
    };

    ExpertClient(Options options, telemetry::Counters& counters);

    Status dispatch();
    Call& take_pick(Call* call, std::size_t server, std::uint32_t pick);
    Call& next_call(std::size_t server);
    Status send(Call& call);
    Status send_or_lose(Call& call);
    Status collect(std::size_t i, std::span<std::int64_t> sums);
    Result<std::optional<transport::Reply>> wait(std::size_t i);
    ExpertServers::Waiting waiting_for(const Call& call);
    Status judge(Call& call);
    void measure(const Call& call, const transport::Reply& reply, Clock::time_point begin);
    Status add(const Call& call, transport::Reply reply, std::span<std::int64_t> sums);
    void put_back(Call& call, const Error& error);

    // expert_hedges.cc
    void plan_hedge(Call& call);
    std::int64_t ms_to_next_hedge() const;
    Status send_due_hedges();
    Status hedge(std::size_t i);
    bool have_hedges_answered(std::size_t i);
    Status add_hedges(std::size_t i, std::span<std::int64_t> sums);
    void drop_hedges(std::size_t i);
    bool promote_hedges(std::size_t i, const Error& error);

    Status recover();
    Status give_up(Error error);
    Error still_gone() const;

    Options options_;
    std::unique_ptr<ExpertServers> servers_;
    std::string failed_service_;
    std::uint64_t hint_;  // number of the last one given

    // Of the current layer.
    Routing routing_;
    std::span<const float> latent_;
    std::size_t latent_size_ = 0;
    std::vector<bool> is_pending_;      // [picks]: not with a server
    std::vector<bool> is_hedged_;       // [picks]: of the call that is hedged
    std::vector<std::uint8_t> chosen_;  // [picks]: whom dispatch gives it to
    std::deque<Call> calls_;            // the first n_calls_ are in use; kept for their memory
    std::size_t n_calls_ = 0;
    std::vector<float> rows_;  // [max_rows, latent_size], gathered for one call
    Clock::time_point finish_began_;
    std::int64_t patience_ms_ = 0;  // left for servers that are gone
    int n_rounds_ = 0;

    std::atomic<std::uint64_t>& n_sent_;
    std::atomic<std::uint64_t>& n_lane_;
    std::atomic<std::uint64_t>& n_repeated_;
    std::atomic<std::uint64_t>& n_late_;
    std::atomic<std::uint64_t>& late_after_ms_;  // the deadline of the last of them
    std::atomic<std::uint64_t>& n_hedged_;
    std::atomic<std::uint64_t>& n_hedges_won_;
    std::atomic<std::uint64_t>& n_stale_;
    std::atomic<std::uint64_t>& sent_bytes_;
    std::atomic<std::uint64_t>& received_bytes_;
    std::atomic<std::uint64_t>& server_compute_ns_;
    std::atomic<std::uint64_t>& server_read_ns_;
};

}  // namespace k3::trunk
