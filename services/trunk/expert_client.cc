#include "services/trunk/expert_client.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <thread>
#include <utility>

#include "common/base/log.h"
#include "common/model/memory_plan.h"
#include "common/transport/tensor_io.h"

namespace k3::trunk {

namespace {

constexpr std::int64_t kSliceMs = 100;     // between looks at whether to stop
constexpr std::int64_t kAbsentTryMs = 20;  // for a server that is not needed right now
constexpr std::int64_t kAbsentEveryMs = 1000;
constexpr std::size_t kCallOverheadBytes = 1024;  // of a call besides rows and picks, generously
constexpr std::int64_t kSpinUs = 50;   // in a fast lane; falling asleep and waking costs as much
constexpr std::int64_t kPauseMs = 20;  // before asking again a server that refused
// A server that dies of every call must not be asked for ever; the launcher backs off meanwhile.
constexpr int kMaxRounds = 10;

bool is_absence(const Error& error) {
    return error.code == ErrorCode::unavailable || error.code == ErrorCode::deadline_exceeded;
}

std::span<const std::byte> as_bytes(std::span<const float> values) { return std::as_bytes(values); }

}  // namespace

ExpertClient::ExpertClient(Options options, telemetry::Counters& counters)
    : options_(std::move(options)),
      directory_(options_.needs, options_.endpoints),
      latent_size_(options_.needs.latent_size),
      is_pending_(options_.max_rows * options_.top_k),
      chosen_(options_.max_rows * options_.top_k),
      rows_(options_.max_rows * options_.needs.latent_size),
      n_sent_(counters.add("expert_calls")),
      n_lane_(counters.add("expert_calls_fast_lane")),
      n_repeated_(counters.add("expert_calls_repeated")),
      n_losses_(counters.add("expert_server_losses")),
      n_stale_(counters.add("expert_calls_stale")),
      sent_bytes_(counters.add("expert_sent_bytes")),
      received_bytes_(counters.add("expert_received_bytes")),
      server_compute_ns_(counters.add("expert_server_compute_ns")),
      server_read_ns_(counters.add("expert_server_read_ns")) {}

Result<std::unique_ptr<ExpertClient>> ExpertClient::create(Options options,
                                                           telemetry::Counters& counters) {
    const std::size_t n = options.endpoints.size();
    if (n > ExpertDirectory::kMaxServers)
        return Error{ErrorCode::invalid_argument,
                     std::to_string(n) + " expert servers were named, a trunk handles " +
                         std::to_string(ExpertDirectory::kMaxServers),
                     "give each server a larger share"};
    std::unique_ptr<ExpertClient> client(new ExpertClient(std::move(options), counters));
    const Options& own = client->options_;
    for (const std::string& endpoint : own.endpoints) {
        ASSIGN_OR_RETURN(auto channel, transport::Channel::create({.endpoint = endpoint,
                                                                   .peer = "expert server",
                                                                   .run_id = own.run_id,
                                                                   .use_lane = own.fast_lane}));
        client->peers_.emplace_back().channel = std::move(channel);
    }
    if (own.use_shm && n > 0) {
        const model::ArenaSize size =
            model::trunk_call_arena(own.needs.latent_size, own.max_rows, n);
        ASSIGN_OR_RETURN(client->arena_,
                         transport::Arena::create(
                             {transport::segment_name(own.run_id, own.needs.self + "-calls"),
                              size.slot_bytes, size.n_slots}));
    }
    return client;
}

Status ExpertClient::stop_if_asked() const {
    if (!options_.stopping || !options_.stopping()) return Status::ok();
    return Error{ErrorCode::cancelled, options_.needs.self + " is stopping", ""};
}

// ---- meeting servers ---------------------------------------------------------------------------

Status ExpertClient::greet(std::size_t server, Deadline deadline) {
    Peer& peer = peers_[server];
    std::vector<msg::SegmentProbe> probes;
    if (arena_) probes.push_back(arena_->probe());
    ASSIGN_OR_RETURN(msg::Announcement announcement, peer.channel->hello(probes, deadline));
    RETURN_IF_ERROR(directory_.admit(server, announcement));
    peer.reads_our_arena = arena_ && !announcement.probes.empty() && announcement.probes[0];
    peer.arena_is_readable = options_.use_shm && !announcement.arena.segment.empty() &&
                             reader_.can_read(announcement.arena);
    peer.up = true;
    choose_spinning();
    return Status::ok();
}

/// Whoever spins must not take the core that the one it waits for computes on.
void ExpertClient::choose_spinning() {
    std::vector<CoreUse> processes = {options_.cores};
    for (const Peer& peer : peers_)
        if (peer.channel->lane().is_open) processes.push_back(peer.channel->lane().peer_cores);
    const bool may_spin = has_core_for_each(processes);
    const std::int64_t us = options_.spin_us >= 0 ? options_.spin_us : may_spin ? kSpinUs : 0;
    for (const Peer& peer : peers_) peer.channel->set_lane_spin_us(static_cast<std::uint32_t>(us));
}

Status ExpertClient::connect() {
    std::vector<Deadline> patience(peers_.size(), Deadline::after_ms(options_.wait_ms));
    std::size_t n_missing = peers_.size();
    while (n_missing > 0) {
        n_missing = 0;
        for (std::size_t s = 0; s < peers_.size(); ++s) {
            if (peers_[s].up) continue;
            RETURN_IF_ERROR(stop_if_asked());
            Status greeted = greet(s, Deadline::after_ms(kSliceMs));
            if (greeted.has_value()) continue;
            if (!is_absence(greeted.error())) return greeted;
            ++n_missing;
            Result<msg::Pong> pong = peers_[s].channel->ping(Deadline::after_ms(kSliceMs));
            if (pong.has_value() && pong->state == msg::State::loading)
                patience[s] = Deadline::after_ms(options_.wait_ms);
            if (patience[s].expired()) return greeted;
        }
    }
    return directory_.check_coverage();
}

void ExpertClient::lose(std::size_t server, const Error& error) {
    if (!peers_[server].up) return;
    peers_[server].up = false;
    peers_[server].next_try = Clock::now() + std::chrono::milliseconds(kAbsentEveryMs);
    n_losses_.fetch_add(1, std::memory_order_relaxed);
    log::warn("lost " + directory_.name(server) + ": " + error.message);
}

std::uint64_t ExpertClient::available() const noexcept {
    std::uint64_t mask = 0;
    for (std::size_t s = 0; s < peers_.size(); ++s)
        if (peers_[s].up) mask |= std::uint64_t{1} << s;
    return mask;
}

/// A lost server whose replicas carry on is looked for now and then, at little cost.
void ExpertClient::try_absent_servers() {
    for (std::size_t s = 0; s < peers_.size(); ++s) {
        Peer& peer = peers_[s];
        if (peer.up || Clock::now() < peer.next_try) continue;
        peer.next_try = Clock::now() + std::chrono::milliseconds(kAbsentEveryMs);
        Status greeted = greet(s, Deadline::after_ms(kAbsentTryMs));
        if (greeted.has_value())
            log::info(directory_.name(s) + " is back");
        else if (!is_absence(greeted.error()))
            log::warn("not using a server that came back: " + greeted.error().sentence());
    }
}

// ---- calls of one layer ------------------------------------------------------------------------

void ExpertClient::prefetch(const Routing& routing) noexcept {
    const std::uint64_t up = available();
    std::vector<msg::Prefetch> hints(peers_.size());
    std::vector<bool> seen(options_.needs.n_experts);
    for (std::uint32_t rank = 0; rank < routing.top_k; ++rank) {
        for (std::size_t row = 0; row < routing.n_rows; ++row) {
            const std::uint32_t expert = routing.ids[row * routing.top_k + rank];
            if (seen[expert]) continue;
            seen[expert] = true;
            const std::size_t server = directory_.choose(routing.layer, expert, up);
            if (server == ExpertDirectory::kNobody) continue;
            hints[server].experts.push_back(expert);
            hints[server].ranks.push_back(rank);
        }
    }
    for (std::size_t s = 0; s < peers_.size(); ++s) {
        if (hints[s].experts.empty()) continue;
        hints[s].layer = routing.layer;
        peers_[s].channel->post(std::move(hints[s]));
    }
}

Status ExpertClient::start(const Routing& routing, std::span<const float> latent) {
    failed_service_.clear();
    routing_ = routing;
    latent_ = latent;
    patience_ms_ = options_.wait_ms;
    n_rounds_ = 0;
    is_pending_.assign(routing.n_rows * routing.top_k, true);
    try_absent_servers();
    Status dispatched = dispatch();
    return dispatched.has_value() ? std::move(dispatched) : give_up(std::move(dispatched).error());
}

Status ExpertClient::finish(std::span<std::int64_t> sums) {
    std::fill(sums.begin(), sums.end(), 0);
    while (true) {
        for (std::size_t i = 0; i < n_calls_; ++i) {
            Status collected = collect(calls_[i], sums);
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
    const std::uint64_t up = available();
    const std::size_t n_picks = is_pending_.size();
    for (std::size_t i = 0; i < n_picks; ++i)
        chosen_[i] = static_cast<std::uint8_t>(
            is_pending_[i] ? directory_.choose(routing_.layer, routing_.ids[i], up)
                           : ExpertDirectory::kNobody);
    n_calls_ = 0;
    for (std::size_t s = 0; s < peers_.size(); ++s) {
        Call* call = nullptr;
        for (std::uint32_t i = 0; i < n_picks; ++i) {
            if (chosen_[i] != s) continue;
            const auto row = static_cast<std::uint32_t>(i / routing_.top_k);
            const bool is_new_row = call == nullptr || call->rows.back() != row;
            if (is_new_row && (call == nullptr || call->rows.size() == directory_.max_call_rows(s)))
                call = &next_call(s);
            if (is_new_row) call->rows.push_back(row);
            call->picks.push_back(i);
            is_pending_[i] = false;
        }
    }
    for (std::size_t i = 0; i < n_calls_; ++i) RETURN_IF_ERROR(send_or_lose(calls_[i]));
    return Status::ok();
}

ExpertClient::Call& ExpertClient::next_call(std::size_t server) {
    if (n_calls_ == calls_.size()) calls_.emplace_back();
    Call& call = calls_[n_calls_++];
    call.server = server;
    call.is_open = false;
    call.is_inline = false;
    call.rows.clear();
    call.picks.clear();
    return call;
}

/// Only the rows this server needs travel; picks count within them.
Status ExpertClient::send(Call& call) {
    Peer& peer = peers_[call.server];
    for (std::size_t j = 0; j < call.rows.size(); ++j)
        std::memcpy(rows_.data() + j * latent_size_, latent_.data() + call.rows[j] * latent_size_,
                    latent_size_ * sizeof(float));
    msg::ExpertCall body;
    body.layer = routing_.layer;
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
                              arena_.get(), peer.reads_our_arena && use_shm, frames);
    ASSIGN_OR_RETURN(call.id, peer.channel->send(std::move(body), std::move(frames)));
    call.is_open = true;
    n_sent_.fetch_add(1, std::memory_order_relaxed);
    const std::uint64_t n_lane_sends = peer.channel->lane().n_sent;
    n_lane_.fetch_add(n_lane_sends - std::exchange(peer.n_lane_sends, n_lane_sends),
                      std::memory_order_relaxed);
    sent_bytes_.fetch_add(rows.size_bytes(), std::memory_order_relaxed);
    return Status::ok();
}

Status ExpertClient::send_or_lose(Call& call) {
    Status sent = send(call);
    if (sent.has_value() || sent.error().code != ErrorCode::unavailable) return sent;
    lose(call.server, sent.error());
    for (std::uint32_t pick : call.picks) is_pending_[pick] = true;
    return Status::ok();
}

/// Waits for a call and adds its sums. A call whose server is gone puts its picks back.
Status ExpertClient::collect(Call& call, std::span<std::int64_t> sums) {
    while (call.is_open) {
        transport::Channel& channel = *peers_[call.server].channel;
        Result<transport::Reply> reply = wait(call);
        failed_service_ = reply.has_value() ? std::string() : channel.failed_service();
        channel.forget(call.id);
        call.is_open = false;
        Status added = reply.has_value() ? add(call, std::move(reply).value(), sums)
                                         : Status(std::move(reply).error());
        if (added.has_value()) return added;
        const ErrorCode code = added.error().code;
        if (code == ErrorCode::unavailable) {
            failed_service_.clear();
            lose(call.server, added.error());
            for (std::uint32_t pick : call.picks) is_pending_[pick] = true;
            return Status::ok();
        }
        const bool is_shm_trouble = code == ErrorCode::stale || code == ErrorCode::not_found;
        if (!is_shm_trouble || call.is_inline) return added;
        if (code == ErrorCode::not_found)  // the segment is gone: no use trying again
            peers_[call.server].reads_our_arena = peers_[call.server].arena_is_readable = false;
        n_stale_.fetch_add(1, std::memory_order_relaxed);
        n_repeated_.fetch_add(1, std::memory_order_relaxed);
        call.is_inline = true;
        RETURN_IF_ERROR(send_or_lose(call));
    }
    return Status::ok();
}

/// In slices, so that a stop is noticed while a server computes.
Result<transport::Reply> ExpertClient::wait(const Call& call) {
    const Deadline deadline = Deadline::after_ms(options_.call_ms);
    while (true) {
        const Deadline slice = deadline.min(Deadline::after_ms(kSliceMs));
        Result<transport::Reply> reply = peers_[call.server].channel->receive(call.id, slice);
        const bool is_slice_over = !reply.has_value() &&
                                   reply.error().code == ErrorCode::deadline_exceeded &&
                                   slice.expired();
        if (!is_slice_over) return reply;
        if (deadline.expired())
            return std::move(reply).error().with_context("layer " + std::to_string(routing_.layer) +
                                                         " after " +
                                                         std::to_string(options_.call_ms) + " ms");
        RETURN_IF_ERROR(stop_if_asked());
    }
}

Status ExpertClient::add(const Call& call, transport::Reply reply, std::span<std::int64_t> sums) {
    const auto* body = std::get_if<msg::PartialSums>(&reply.body);
    if (body == nullptr)
        return Error{ErrorCode::internal,
                     directory_.name(call.server) + " answered an ExpertCall with " +
                         std::string(msg::name_of(reply.body)),
                     "check that the endpoint belongs to an expert server"};
    const std::uint64_t shape[] = {call.rows.size(), latent_size_};
    Result<msg::Bytes> taken = transport::take_tensor(
        body->sums, "the tensor of partial sums", msg::DType::i64, shape, reply.frames, reader_);
    if (!taken.has_value()) {
        Error error = std::move(taken).error().with_context(directory_.name(call.server));
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
    while (true) {
        const std::uint64_t up = available();
        for (std::size_t i = 0; i < is_pending_.size(); ++i) {
            if (!is_pending_[i] ||
                directory_.choose(routing_.layer, routing_.ids[i], up) == ExpertDirectory::kNobody)
                continue;
            n_repeated_.fetch_add(1, std::memory_order_relaxed);
            patience_ms_ -=
                std::chrono::duration_cast<std::chrono::milliseconds>(Clock::now() - begin).count();
            return Status::ok();
        }
        for (std::size_t s = 0; s < peers_.size(); ++s) {
            if (peers_[s].up) continue;
            RETURN_IF_ERROR(stop_if_asked());
            Status greeted = greet(s, deadline.min(Deadline::after_ms(kSliceMs)));
            if (greeted.has_value()) {
                log::info(directory_.name(s) + " is back");
                RETURN_IF_ERROR(directory_.check_coverage());
            } else if (!is_absence(greeted.error())) {
                return greeted;
            }
        }
        if (deadline.expired()) return still_gone();
    }
}

Error ExpertClient::still_gone() const {
    std::string gone;
    for (std::size_t s = 0; s < peers_.size(); ++s)
        if (!peers_[s].up) gone += (gone.empty() ? "" : ", ") + directory_.name(s);
    const auto n_pending = std::count(is_pending_.begin(), is_pending_.end(), true);
    return {ErrorCode::unavailable,
            (gone.empty() ? "an expert server" : gone) + " did not come back within " +
                std::to_string(options_.wait_ms) + " ms; layer " + std::to_string(routing_.layer) +
                " waits for " + std::to_string(n_pending) + " picks",
            "start it again, or give it more time with --expert-wait-ms"};
}

Status ExpertClient::give_up(Error error) {
    for (std::size_t i = 0; i < n_calls_; ++i) {
        if (calls_[i].is_open) peers_[calls_[i].server].channel->forget(calls_[i].id);
        calls_[i].is_open = false;
    }
    return error;
}

}  // namespace k3::trunk
