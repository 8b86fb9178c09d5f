// Second calls: the picks of a call that takes long go to replicas as well.
//
// A hedge is a call of its own that names the call whose picks it has. Its sums are added only when
// all hedges of that call have answered before it; else they are dropped. It carries everything
// inside its messages, so that a held reply cannot grow stale. If the server of the call is lost
// meanwhile, its hedges become ordinary calls.

#include <algorithm>
#include <chrono>
#include <utility>

#include "services/trunk/expert_client.h"

namespace k3::trunk {

namespace {

constexpr std::int64_t kNeverMs = std::int64_t{1} << 40U;
constexpr std::int64_t kHedgeLookMs = 1;  // at each hedge, in turn with the call itself

}  // namespace

void ExpertClient::plan_hedge(Call& call) {
    if (options_.hedge_quantile <= 0 || !call.is_open) return;
    const std::uint64_t ns =
        (*servers_)[call.server].times.quantile_ns(call.picks.size(), options_.hedge_quantile);
    if (ns > 0) call.hedge_after_ms = static_cast<std::int64_t>(ns / 1'000'000) + 1;
}

std::int64_t ExpertClient::ms_to_next_hedge() const {
    std::int64_t next = kNeverMs;
    for (std::size_t i = 0; i < n_calls_; ++i)
        if (calls_[i].is_open && calls_[i].hedge_after_ms >= 0)
            next = std::min(next, calls_[i].hedge_after_ms - ms_since(calls_[i].sent_at));
    return std::max<std::int64_t>(next, 1);
}

Status ExpertClient::send_due_hedges() {
    const std::size_t n = n_calls_;  // hedges of these come behind
    for (std::size_t i = 0; i < n; ++i) {
        Call& call = calls_[i];
        if (!call.is_open || call.hedge_after_ms < 0 ||
            ms_since(call.sent_at) < call.hedge_after_ms)
            continue;
        call.hedge_after_ms = -1;
        RETURN_IF_ERROR(hedge(i));
    }
    return Status::ok();
}

/// Nothing if some pick of the call has no other holder that is likely to be quicker.
Status ExpertClient::hedge(std::size_t i) {
    Call& call = calls_[i];
    const std::uint64_t others =
        servers_->available() & ~servers_->indebted() & ~(std::uint64_t{1} << call.server);
    is_hedged_.assign(is_pending_.size(), false);
    for (std::uint32_t pick : call.picks) is_hedged_[pick] = true;
    servers_->directory().choose(routing_, is_hedged_, others, 0, chosen_);
    for (std::uint32_t pick : call.picks)
        if (chosen_[pick] == ExpertDirectory::kNobody) return Status::ok();
    const std::size_t first = n_calls_;
    for (std::size_t s = 0; s < servers_->size(); ++s) {
        Call* second = nullptr;
        for (std::uint32_t pick : call.picks)
            if (chosen_[pick] == s) second = &take_pick(second, s, pick);
    }
    for (std::size_t h = first; h < n_calls_; ++h) {
        calls_[h].hedge_of = i;
        calls_[h].is_inline = true;
        calls_[h].sent_at = Clock::now();
        ++call.n_hedges;
    }
    n_hedged_.fetch_add(1, std::memory_order_relaxed);
    for (std::size_t h = first; h < n_calls_; ++h) {
        const Status sent = send(calls_[h]);
        if (sent.has_value()) continue;
        if (sent.error().code == ErrorCode::unavailable)
            if (auto why =
                    servers_->why_unsent(calls_[h].server, waiting_for(calls_[h]), sent.error()))
                servers_->lose(calls_[h].server, *why);
        drop_hedges(i);  // the call itself goes on
        break;
    }
    return Status::ok();
}

bool ExpertClient::have_hedges_answered(std::size_t i) {
    if (calls_[i].n_hedges == 0) return false;
    bool have_all = true;
    for (std::size_t h = i + 1; h < n_calls_; ++h) {
        Call& second = calls_[h];
        if (second.hedge_of != i || second.held) continue;
        const Deadline slice = Deadline::after_ms(kHedgeLookMs);
        Result<transport::Reply> reply =
            (*servers_)[second.server].channel->receive(second.id, slice);
        if (reply.has_value()) {
            second.held = std::move(reply).value();
        } else if (reply.error().code == ErrorCode::deadline_exceeded && slice.expired()) {
            have_all = false;
        } else {
            if (reply.error().code == ErrorCode::unavailable)
                servers_->lose(second.server, reply.error());
            drop_hedges(i);
            return false;
        }
    }
    return have_all;
}

/// The call itself is dropped: its answer, if one comes, belongs to nobody. Until then its server
/// gets no more of what others can do as well: it would only queue behind.
Status ExpertClient::add_hedges(std::size_t i, std::span<std::int64_t> sums) {
    Call& call = calls_[i];
    ExpertServers::Peer& peer = (*servers_)[call.server];
    peer.times.add_unfinished(
        call.picks.size(),
        static_cast<std::uint64_t>(
            std::chrono::duration_cast<std::chrono::nanoseconds>(Clock::now() - call.sent_at)
                .count()));
    if (peer.owed_call == 0) {
        peer.owed_call = call.id;
        peer.owed = waiting_for(call);
    } else {
        peer.channel->forget(call.id);
    }
    call.is_open = false;
    n_hedges_won_.fetch_add(1, std::memory_order_relaxed);
    for (std::size_t h = i + 1; h < n_calls_; ++h) {
        Call& second = calls_[h];
        if (second.hedge_of != i) continue;
        second.is_open = false;
        RETURN_IF_ERROR(add(second, *std::exchange(second.held, std::nullopt), sums));
    }
    call.n_hedges = 0;
    return Status::ok();
}

void ExpertClient::drop_hedges(std::size_t i) {
    if (std::exchange(calls_[i].n_hedges, 0) == 0) return;
    for (std::size_t h = i + 1; h < n_calls_; ++h) {
        Call& second = calls_[h];
        if (second.hedge_of != i) continue;
        if (second.is_open) (*servers_)[second.server].channel->forget(second.id);
        second.is_open = false;
        second.held.reset();
    }
}

/// False if there are none: the picks of the call are nobody's then.
bool ExpertClient::promote_hedges(std::size_t i, const Error& error) {
    if (std::exchange(calls_[i].n_hedges, 0) == 0) return false;
    servers_->lose(calls_[i].server, error);
    for (std::size_t h = i + 1; h < n_calls_; ++h)
        if (calls_[h].hedge_of == i) calls_[h].hedge_of = kNoCall;
    return true;
}

}  // namespace k3::trunk
