#include "services/trunk/expert_client.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <random>
#include <thread>
#include <utility>

#include "common/transport/tensor_io.h"

namespace k3::trunk {

namespace {

constexpr std::int64_t kSliceMs = 50;  // between looks at a server that has not answered
constexpr std::uint64_t kEverybody = ~std::uint64_t{0};
constexpr std::int64_t kStopMs = 100;             // likewise, while there is nobody to ask
constexpr std::size_t kCallOverheadBytes = 1024;  // of a call besides rows and picks, generously
constexpr std::int64_t kHedgedSliceMs = 1;        // between looks at either of two who may answer
// Somebody has waited for a reply if it took this part of the call, or so long and the call was
// short.
constexpr int kWaitedPart = 8;
constexpr std::chrono::microseconds kWaited{200};
constexpr std::chrono::milliseconds kShortCall{100};
constexpr std::int64_t kPauseMs = 20;  // before asking again a server that refused
// A server that dies of every call must not be asked for ever; the launcher backs off meanwhile.
constexpr int kMaxRounds = 10;

std::uint64_t random_number() {
    std::random_device device;
    return std::uint64_t{device()} << 32U | device();
}

std::span<const std::byte> as_bytes(std::span<const float> values) { return std::as_bytes(values); }

}  // namespace

ExpertClient::ExpertClient(Options options, telemetry::Counters& counters)
    : options_(std::move(options)),
      hint_(random_number()),
      latent_size_(options_.needs.latent_size),
      is_pending_(options_.max_rows * options_.top_k),
      chosen_(options_.max_rows * options_.top_k),
      rows_(options_.max_rows * options_.needs.latent_size),
      n_sent_(counters.add("expert_calls")),
      n_lane_(counters.add("expert_calls_fast_lane")),
      n_repeated_(counters.add("expert_calls_repeated")),
      n_late_(counters.add("expert_calls_late")),
      late_after_ms_(counters.add("expert_calls_late_after_ms")),
      n_hedged_(counters.add("expert_calls_hedged")),
      n_hedges_won_(counters.add("expert_calls_hedges_won")),
      n_stale_(counters.add("expert_calls_stale")),
      sent_bytes_(counters.add("expert_sent_bytes")),
      received_bytes_(counters.add("expert_received_bytes")),
      server_compute_ns_(counters.add("expert_server_compute_ns")),
      server_read_ns_(counters.add("expert_server_read_ns")) {}

Result<std::unique_ptr<ExpertClient>> ExpertClient::create(Options options,
                                                           telemetry::Counters& counters) {
    ExpertServers::Options servers;
    servers.needs = options.needs;
    servers.endpoints = options.endpoints;
    servers.run_id = options.run_id;
    servers.max_rows = options.max_rows;
    servers.wait_ms = options.wait_ms;
    servers.use_shm = options.use_shm;
    servers.keys = options.keys;
    servers.fast_lane = options.fast_lane;
    servers.spin_us = options.spin_us;
    servers.cores = options.cores;
    servers.stopping = options.stopping;
    servers.on_waiting = options.on_waiting;
    servers.stuck_ms = options.stuck_ms;
    std::unique_ptr<ExpertClient> client(new ExpertClient(std::move(options), counters));
    ASSIGN_OR_RETURN(client->servers_, ExpertServers::create(std::move(servers), counters));
    return client;
}

// ---- calls of one layer ------------------------------------------------------------------------

void ExpertClient::prefetch(const Routing& routing) noexcept {
    ++hint_;
    std::vector<msg::Prefetch> hints(servers_->size());
    std::vector<bool> seen(options_.needs.n_experts);
    is_pending_.assign(routing.n_rows * routing.top_k, true);
    servers_->directory().choose(routing, is_pending_, servers_->available(), servers_->indebted(),
                                 chosen_);
    for (std::uint32_t rank = 0; rank < routing.top_k; ++rank) {
        for (std::size_t row = 0; row < routing.n_rows; ++row) {
            const std::size_t pick = row * routing.top_k + rank;
            const std::uint32_t expert = routing.ids[pick];
            if (seen[expert]) continue;
            seen[expert] = true;
            const std::size_t server = chosen_[pick];
            if (server == ExpertDirectory::kNobody) continue;
            hints[server].experts.push_back(expert);
            hints[server].ranks.push_back(rank);
        }
    }
    for (std::size_t s = 0; s < servers_->size(); ++s) {
        if (hints[s].experts.empty()) continue;
        hints[s].layer = routing.layer;
        hints[s].number = hint_;
        (*servers_)[s].channel->post(std::move(hints[s]));
    }
}

Status ExpertClient::start(const Routing& routing, std::span<const float> latent) {
    failed_service_.clear();
    routing_ = routing;
    latent_ = latent;
    patience_ms_ = options_.wait_ms;
    n_rounds_ = 0;
    is_pending_.assign(routing.n_rows * routing.top_k, true);
    servers_->refresh(kAbsentTryMs);
    servers_->collect_debts();
    Status dispatched = dispatch();
    return dispatched.has_value() ? std::move(dispatched) : give_up(std::move(dispatched).error());
}

Status ExpertClient::finish(std::span<std::int64_t> sums) {
    finish_began_ = Clock::now();
    std::fill(sums.begin(), sums.end(), 0);
    while (true) {
        for (std::size_t i = 0; i < n_calls_; ++i) {
            if (calls_[i].hedge_of != kNoCall) continue;
            Status collected = collect(i, sums);
            if (!collected.has_value()) return give_up(std::move(collected).error());
        }
        if (std::find(is_pending_.begin(), is_pending_.end(), true) == is_pending_.end())
            return Status::ok();
        Status recovered = recover();
        if (recovered.has_value()) recovered = dispatch();
        if (!recovered.has_value()) return give_up(std::move(recovered).error());
    }
}

/// Gives every pending pick to a server that is there and sends the calls. What nobody can take
/// stays pending.
Status ExpertClient::dispatch() {
    const std::size_t n_picks = is_pending_.size();
    servers_->directory().choose(routing_, is_pending_, servers_->available(), servers_->indebted(),
                                 chosen_);
    n_calls_ = 0;
    for (std::size_t s = 0; s < servers_->size(); ++s) {
        Call* call = nullptr;
        for (std::uint32_t i = 0; i < n_picks; ++i) {
            if (chosen_[i] != s) continue;
            call = &take_pick(call, s, i);
            is_pending_[i] = false;
        }
    }
    for (std::size_t i = 0; i < n_calls_; ++i) {
        RETURN_IF_ERROR(send_or_lose(calls_[i]));
        plan_hedge(calls_[i]);
    }
    return Status::ok();
}

/// Gives a pick to `call` (null: none yet), or to the next one if that is full.
ExpertClient::Call& ExpertClient::take_pick(Call* call, std::size_t server, std::uint32_t pick) {
    const auto row = static_cast<std::uint32_t>(pick / routing_.top_k);
    const bool is_new_row = call == nullptr || call->rows.back() != row;
    const std::size_t most_rows = servers_->directory().max_call_rows(server);
    if (is_new_row && (call == nullptr || call->rows.size() == most_rows))
        call = &next_call(server);
    if (is_new_row) call->rows.push_back(row);
    call->picks.push_back(pick);
    return *call;
}

ExpertClient::Call& ExpertClient::next_call(std::size_t server) {
    if (n_calls_ == calls_.size()) calls_.emplace_back();
    Call& call = calls_[n_calls_++];
    call.server = server;
    call.is_open = false;
    call.is_inline = false;
    call.rows.clear();
    call.picks.clear();
    call.is_told_late = false;
    call.hedge_after_ms = -1;
    call.hedge_of = kNoCall;
    call.n_hedges = 0;
    call.held.reset();
    return call;
}

/// Only the rows this server needs travel; picks count within them.
Status ExpertClient::send(Call& call) {
    ExpertServers::Peer& peer = (*servers_)[call.server];
    for (std::size_t j = 0; j < call.rows.size(); ++j)
        std::memcpy(rows_.data() + j * latent_size_, latent_.data() + call.rows[j] * latent_size_,
                    latent_size_ * sizeof(float));
    msg::ExpertCall body;
    body.layer = routing_.layer;
    body.hint = hint_;
    const std::size_t n_values = call.rows.size() * latent_size_;
    // Whole calls go through the lane; large ones put their tensors into arenas.
    const bool in_lane = peer.channel->lane_takes(
        n_values * sizeof(float) + call.picks.size() * sizeof(msg::Pick) + kCallOverheadBytes,
        n_values * sizeof(std::int64_t) + kCallOverheadBytes);
    const bool use_shm = !in_lane && !call.is_inline;
    body.reply_shm = peer.arena_is_readable && use_shm;
    body.picks.reserve(call.picks.size());
    std::uint32_t row = 0;
    for (std::uint32_t pick : call.picks) {
        const auto top_k = static_cast<std::uint32_t>(routing_.top_k);
        while (call.rows[row] != pick / top_k) ++row;
        body.picks.push_back({row, routing_.ids[pick], routing_.weights[pick], pick % top_k});
    }
    const std::span<const float> rows(rows_.data(), n_values);
    std::vector<msg::Bytes> frames;
    body.rows =
        transport::put_tensor(msg::DType::f32, {call.rows.size(), latent_size_}, as_bytes(rows),
                              servers_->arena(), peer.reads_our_arena && use_shm, frames);
    ASSIGN_OR_RETURN(call.id, peer.channel->send(std::move(body), std::move(frames)));
    call.is_open = true;
    call.sent_at = Clock::now();
    n_sent_.fetch_add(1, std::memory_order_relaxed);
    const std::uint64_t n_lane_sends = peer.channel->lane().n_sent;
    n_lane_.fetch_add(n_lane_sends - std::exchange(peer.n_lane_sends, n_lane_sends),
                      std::memory_order_relaxed);
    sent_bytes_.fetch_add(rows.size_bytes(), std::memory_order_relaxed);
    return Status::ok();
}

Status ExpertClient::send_or_lose(Call& call) {
    const Deadline deadline = Deadline::after_ms(options_.call_ms);
    call.sent_at = Clock::now();  // begun; send() says when
    while (true) {
        Status sent = send(call);
        if (sent.has_value() || sent.error().code != ErrorCode::unavailable) return sent;
        std::optional<Error> why =
            servers_->why_unsent(call.server, waiting_for(call), sent.error());
        if (!why && deadline.expired()) why = std::move(sent).error();
        if (why) {
            put_back(call, *why);
            return Status::ok();
        }
        RETURN_IF_ERROR(servers_->stop_if_asked());
    }
}

/// Its server is gone, and its picks wait for another one.
void ExpertClient::put_back(Call& call, const Error& error) {
    servers_->lose(call.server, error);
    call.is_open = false;
    for (std::uint32_t pick : call.picks) is_pending_[pick] = true;
}

/// Waits for a call and adds its sums. A call whose server is gone puts its picks back.
Status ExpertClient::collect(std::size_t i, std::span<std::int64_t> sums) {
    Call& call = calls_[i];
    while (call.is_open) {
        ExpertServers::Peer& peer = (*servers_)[call.server];
        const Clock::time_point begin = Clock::now();
        Result<std::optional<transport::Reply>> reply = wait(i);
        if (reply.has_value() && !reply->has_value()) return add_hedges(i, sums);
        failed_service_ = reply.has_value() ? std::string() : peer.channel->failed_service();
        peer.channel->forget(call.id);
        call.is_open = false;
        if (reply.has_value()) measure(call, **reply, begin);
        Status added = reply.has_value() ? add(call, **std::move(reply), sums)
                                         : Status(std::move(reply).error());
        if (added.has_value()) {
            drop_hedges(i);
            return added;
        }
        const ErrorCode code = added.error().code;
        if (code == ErrorCode::unavailable) {
            failed_service_.clear();
            if (!promote_hedges(i, added.error())) put_back(call, added.error());
            return Status::ok();
        }
        const bool is_shm_trouble = code == ErrorCode::stale || code == ErrorCode::not_found;
        if (!is_shm_trouble || call.is_inline) return added;
        if (code == ErrorCode::not_found)  // the segment is gone: no use trying again
            peer.reads_our_arena = peer.arena_is_readable = false;
        n_stale_.fetch_add(1, std::memory_order_relaxed);
        n_repeated_.fetch_add(1, std::memory_order_relaxed);
        call.is_inline = true;
        RETURN_IF_ERROR(send_or_lose(call));
    }
    return Status::ok();
}

/// In slices, so that a stop, a server in trouble and the time for a hedge are noticed meanwhile.
/// Nothing: the hedges of the call have answered, it has not.
Result<std::optional<transport::Reply>> ExpertClient::wait(std::size_t i) {
    Call& call = calls_[i];
    if (call.held) return std::exchange(call.held, std::nullopt);
    const Deadline deadline = Deadline::after_ms(options_.call_ms);
    while (true) {
        const std::int64_t slice_ms =
            call.n_hedges > 0 ? kHedgedSliceMs : std::min(kSliceMs, ms_to_next_hedge());
        const Deadline slice = deadline.min(Deadline::after_ms(slice_ms));
        Result<transport::Reply> reply = (*servers_)[call.server].channel->receive(call.id, slice);
        if (reply.has_value()) return std::optional(std::move(reply).value());
        if (reply.error().code != ErrorCode::deadline_exceeded || !slice.expired())
            return std::move(reply).error();
        if (have_hedges_answered(i)) return std::optional<transport::Reply>();
        if (deadline.expired())
            return std::move(reply).error().with_context("layer " + std::to_string(routing_.layer) +
                                                         " after " +
                                                         std::to_string(options_.call_ms) + " ms");
        RETURN_IF_ERROR(servers_->stop_if_asked());
        RETURN_IF_ERROR(judge(call));
        RETURN_IF_ERROR(send_due_hedges());
    }
}

ExpertServers::Waiting ExpertClient::waiting_for(const Call& call) {
    return {
        call.sent_at, (*servers_)[call.server].times.deadline_ms(call.picks.size()),
        std::to_string(call.picks.size()) + " picks of layer " + std::to_string(routing_.layer)};
}

/// Error: unavailable, if the server of a late call is to be given up.
Status ExpertClient::judge(Call& call) {
    const std::int64_t age_ms = ms_since(call.sent_at);
    const std::int64_t deadline_ms = (*servers_)[call.server].times.deadline_ms(call.picks.size());
    if (age_ms < deadline_ms) return Status::ok();
    if (!std::exchange(call.is_told_late, true)) {
        n_late_.fetch_add(1, std::memory_order_relaxed);
        late_after_ms_.store(static_cast<std::uint64_t>(deadline_ms), std::memory_order_relaxed);
    }
    const ExpertServers::Waiting waiting = waiting_for(call);
    if (std::optional<Error> verdict = servers_->verdict(call.server, waiting))
        return *std::move(verdict);
    servers_->tell_late(call.server, waiting);
    return Status::ok();
}

/// A reply that was there before anybody looked does not tell when it came. It counts as having
/// come when waiting began at all: time spent on waiting for other servers is no slowness of this
/// one.
void ExpertClient::measure(const Call& call, const transport::Reply& reply,
                           Clock::time_point begin) {
    const auto* sums = std::get_if<msg::PartialSums>(&reply.body);
    if (sums == nullptr) return;
    const Clock::time_point now = Clock::now();
    const auto total = std::chrono::duration_cast<std::chrono::nanoseconds>(now - call.sent_at);
    ServiceTimes::Sample sample{call.picks.size(), sums->compute_ns, sums->read_ns, 0};
    const Clock::duration waited = now - begin;
    const bool was_there =
        waited <= total / kWaitedPart && (waited <= kWaited || total >= kShortCall);
    const auto known = was_there ? finish_began_ - call.sent_at : total;
    if (known.count() > 0) sample.total_ns = static_cast<std::uint64_t>(known.count());
    (*servers_)[call.server].times.add(sample);
}

Status ExpertClient::add(const Call& call, transport::Reply reply, std::span<std::int64_t> sums) {
    const auto* body = std::get_if<msg::PartialSums>(&reply.body);
    if (body == nullptr)
        return Error{ErrorCode::internal,
                     servers_->directory().name(call.server) + " answered an ExpertCall with " +
                         std::string(msg::name_of(reply.body)),
                     "check that the endpoint belongs to an expert server"};
    const std::uint64_t shape[] = {call.rows.size(), latent_size_};
    Result<msg::Bytes> taken =
        transport::take_tensor(body->sums, "the tensor of partial sums", msg::DType::i64, shape,
                               reply.frames, servers_->reader());
    if (!taken.has_value()) {
        Error error =
            std::move(taken).error().with_context(servers_->directory().name(call.server));
        // What a server sends cannot be the fault of whoever asked this trunk.
        if (error.code == ErrorCode::invalid_argument) error.code = ErrorCode::incompatible;
        return error;
    }
    const msg::Bytes bytes = std::move(taken).value();
    received_bytes_.fetch_add(bytes.size(), std::memory_order_relaxed);
    server_compute_ns_.fetch_add(body->compute_ns, std::memory_order_relaxed);
    server_read_ns_.fetch_add(body->read_ns, std::memory_order_relaxed);
    const std::span<const std::int64_t> partial = transport::view_as<std::int64_t>(bytes);
    for (std::size_t j = 0; j < call.rows.size(); ++j) {
        std::int64_t* row = sums.data() + call.rows[j] * latent_size_;
        for (std::size_t d = 0; d < latent_size_; ++d)  // wraps instead of being undefined
            row[d] = static_cast<std::int64_t>(
                static_cast<std::uint64_t>(row[d]) +
                static_cast<std::uint64_t>(partial[j * latent_size_ + d]));
    }
    return Status::ok();
}

// ---- when a server is gone ---------------------------------------------------------------------

/// Waits until a holder of some pending pick is there again, as long as patience lasts.
Status ExpertClient::recover() {
    const Clock::time_point begin = Clock::now();
    if (++n_rounds_ > kMaxRounds || patience_ms_ <= 0) return still_gone();
    if (n_rounds_ > 1) std::this_thread::sleep_for(std::chrono::milliseconds(kPauseMs));
    const Deadline deadline = Deadline::after_ms(patience_ms_);
    const ExpertDirectory& directory = servers_->directory();
    while (true) {
        const std::uint64_t up = servers_->available();
        bool is_given_up = false;  // some expert is held by nobody at all, there or not
        for (std::size_t i = 0; i < is_pending_.size(); ++i) {
            if (!is_pending_[i]) continue;
            const std::uint32_t expert = routing_.ids[i];
            if (directory.is_held(routing_.layer, expert, up)) {
                n_repeated_.fetch_add(1, std::memory_order_relaxed);
                patience_ms_ -= ms_since(begin);
                return Status::ok();
            }
            is_given_up = is_given_up || !directory.is_held(routing_.layer, expert, kEverybody);
        }
        const std::optional<Error> refusal = servers_->refusal();
        if (is_given_up && refusal) return *refusal;
        RETURN_IF_ERROR(servers_->stop_if_asked());
        if (deadline.expired()) return still_gone();
        servers_->wait_for_news(std::min(kStopMs, deadline.remaining_ms()));
        servers_->refresh(kStopMs);
    }
}

Error ExpertClient::still_gone() const {
    const std::string gone = servers_->absent();
    const auto n_pending = std::count(is_pending_.begin(), is_pending_.end(), true);
    return {ErrorCode::unavailable,
            "layer " + std::to_string(routing_.layer) + " has waited " +
                std::to_string(options_.wait_ms) + " ms with " + std::to_string(n_pending) +
                " picks for " + (gone.empty() ? "an expert server that fails every call" : gone),
            "start it again, or give it more time with --expert-wait-ms"};
}

Status ExpertClient::give_up(Error error) {
    for (std::size_t i = 0; i < n_calls_; ++i) {
        if (calls_[i].is_open) (*servers_)[calls_[i].server].channel->forget(calls_[i].id);
        calls_[i].is_open = false;
    }
    return error;
}

}  // namespace k3::trunk
