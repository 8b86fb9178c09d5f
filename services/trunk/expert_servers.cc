#include "services/trunk/expert_servers.h"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <utility>

#include "common/base/log.h"
#include "common/model/memory_plan.h"

namespace k3::trunk {

using transport::Vitals;

namespace {

constexpr std::int64_t kGreetMs = 100;       // one hello; between looks at whether to stop
constexpr std::int64_t kFirstWordMs = 1000;  // about servers that are waited for; then doubling
constexpr std::int64_t kLongestSilenceMs = 60'000;
constexpr std::int64_t kTryAgainMs = 250;     // a server that is back and did not answer a hello
constexpr std::int64_t kTellLateMs = 30'000;  // between lines about late calls
constexpr std::int64_t kLateMs = 1000;        // behind the deadline, that a line is worth
constexpr std::int64_t kAliveMs = 1000;       // an answer so young tells slow from silent
constexpr std::size_t kMostNamed = 4;         // in one sentence
constexpr std::int64_t kSpinUs = 50;  // in a fast lane; falling asleep and waking costs as much

bool is_absence(const Error& error) {
    return error.code == ErrorCode::unavailable || error.code == ErrorCode::deadline_exceeded;
}

std::string seconds(std::int64_t ms) {
    return fmt::format("{:.1f} s", static_cast<double>(ms) / 1e3);
}

/// A sentence about a server, for others that name it themselves: "experts-1 (ENDPOINT) has closed
/// the connection" without its beginning, `instead` in place of a subject.
std::string without_name(const std::string& message, const std::string& endpoint,
                         const char* instead) {
    const std::string name_end = endpoint + ")";
    const std::size_t at = message.find(name_end);
    if (at == std::string::npos) return message;
    const std::string rest = message.substr(at + name_end.size());
    if (rest.starts_with(": ")) return rest.substr(2);
    return rest.starts_with(' ') ? instead + rest.substr(1) : message;
}

/// In which way a server is silent that has not answered for so long, and what to do.
Error describe_silence(const std::string& name, std::int64_t silent_ms, Vitals::Door door) {
    std::string how;
    std::string remedy;
    switch (door) {
        case Vitals::Door::accepts:
            how = "is wedged: its box accepts connections, but the process has not answered for ";
            remedy =
                "see whether it is stopped (SIGSTOP), swapped out or gets no CPU; restart it "
                "if it stays so";
            break;
        case Vitals::Door::silent:
            how = "is unreachable: nothing has come back from its box for ";
            remedy = "check the network between the boxes, firewalls, and whether that box is up";
            break;
        case Vitals::Door::refuses:
            how = "is gone: nobody listens at its endpoint, and it has not answered for ";
            remedy = "start it again, if no launcher does";
            break;
        case Vitals::Door::unknown:
            how = "is silent: it has not answered for ";
            remedy = "check the network, and whether the process is stopped";
            break;
    }
    return {ErrorCode::unavailable, name + " " + how + seconds(silent_ms), std::move(remedy)};
}

}  // namespace

ExpertServers::ExpertServers(Options options, telemetry::Counters& counters)
    : options_(std::move(options)),
      directory_(options_.needs, options_.endpoints),
      n_up_(counters.add("expert_servers_up")),
      n_losses_(counters.add("expert_server_losses")),
      n_silent_(counters.add("expert_server_silences")),
      n_stuck_(counters.add("expert_server_stalls")) {}

Result<std::unique_ptr<ExpertServers>> ExpertServers::create(Options options,
                                                             telemetry::Counters& counters) {
    const std::size_t n = options.endpoints.size();
    if (n > ExpertDirectory::kMaxServers)
        return Error{ErrorCode::invalid_argument,
                     std::to_string(n) + " expert servers were named, a trunk handles " +
                         std::to_string(ExpertDirectory::kMaxServers),
                     "give each server a larger share"};
    std::unique_ptr<ExpertServers> servers(new ExpertServers(std::move(options), counters));
    const Options& own = servers->options_;
    transport::Heartbeat::Options heartbeat;
    heartbeat.endpoints = own.endpoints;
    heartbeat.run_id = own.run_id;
    heartbeat.keys = own.keys;
    heartbeat.silence_ms = kSilenceMs + ServiceTimes::kFloorMs;
    for (const std::string& endpoint : own.endpoints) {
        transport::Channel::Options channel;
        channel.endpoint = endpoint;
        channel.peer = "expert server";
        channel.run_id = own.run_id;
        channel.keys = own.keys;
        channel.ping_ms = heartbeat.ping_ms;
        channel.liveness_ms = std::int64_t{1} << 40U;  // judged here, by verdict()
        channel.use_lane = own.fast_lane;
        ASSIGN_OR_RETURN(servers->peers_.emplace_back().channel,
                         transport::Channel::create(std::move(channel)));
    }
    if (own.use_shm && n > 0) {
        const model::ArenaSize size =
            model::trunk_call_arena(own.needs.latent_size, own.max_rows, n);
        ASSIGN_OR_RETURN(servers->arena_,
                         transport::Arena::create(
                             {transport::segment_name(own.run_id, own.needs.self + "-calls"),
                              size.slot_bytes, size.n_slots}));
    }
    ASSIGN_OR_RETURN(servers->heartbeat_, transport::Heartbeat::start(std::move(heartbeat)));
    return servers;
}

Status ExpertServers::stop_if_asked() const {
    if (!options_.stopping || !options_.stopping()) return Status::ok();
    return Error{ErrorCode::cancelled, options_.needs.self + " is stopping", ""};
}

std::uint64_t ExpertServers::available() const noexcept {
    std::uint64_t mask = 0;
    for (std::size_t s = 0; s < peers_.size(); ++s)
        if (peers_[s].up) mask |= std::uint64_t{1} << s;
    return mask;
}

std::uint64_t ExpertServers::indebted() const noexcept {
    std::uint64_t mask = 0;
    for (std::size_t s = 0; s < peers_.size(); ++s)
        if (peers_[s].owed_call != 0) mask |= std::uint64_t{1} << s;
    return mask;
}

// ---- meeting -----------------------------------------------------------------------------------

Status ExpertServers::greet(std::size_t server, Deadline deadline) {
    Peer& peer = peers_[server];
    std::vector<msg::SegmentProbe> probes;
    if (arena_) probes.push_back(arena_->probe());
    ASSIGN_OR_RETURN(msg::Announcement announcement, peer.channel->hello(probes, deadline));
    RETURN_IF_ERROR(directory_.admit(server, announcement));
    peer.reads_our_arena = arena_ && !announcement.probes.empty() && announcement.probes[0];
    peer.arena_is_readable = options_.use_shm && !announcement.arena.segment.empty() &&
                             reader_.can_read(announcement.arena);
    peer.up = true;
    peer.is_heard = false;
    peer.greeted_at = Clock::now();
    peer.stuck = 0;
    peer.refusal.reset();
    peer.trouble.clear();
    n_up_.fetch_add(1, std::memory_order_relaxed);
    choose_spinning();
    if (const std::string& trouble = peer.channel->lane().trouble; !trouble.empty())
        log::warn("no fast lane to " + directory_.name(server) + ": " + trouble);
    return Status::ok();
}

/// Whoever spins must not take the core that the one it waits for computes on.
void ExpertServers::choose_spinning() {
    std::vector<CoreUse> processes = {options_.cores};
    for (const Peer& peer : peers_)
        if (peer.channel->lane().is_open) processes.push_back(peer.channel->lane().peer_cores);
    const bool may_spin = has_core_for_each(processes);
    const std::int64_t us = options_.spin_us >= 0 ? options_.spin_us : may_spin ? kSpinUs : 0;
    for (const Peer& peer : peers_) peer.channel->set_lane_spin_us(static_cast<std::uint32_t>(us));
}

/// For whoever started this process by hand and the others not yet, or elsewhere.
void ExpertServers::say_who_is_missing() const {
    std::string who;
    for (const Peer& peer : peers_)
        if (!peer.up) who += (who.empty() ? "" : ", ") + peer.channel->options().endpoint;
    log::info("waiting for expert servers at " + who);
}

Status ExpertServers::connect() {
    std::vector<Deadline> patience(peers_.size(), Deadline::after_ms(options_.wait_ms));
    std::size_t n_missing = peers_.size();
    std::chrono::milliseconds pause(kFirstWordMs);
    Clock::time_point next_word = Clock::now() + pause;
    while (n_missing > 0) {
        if (Clock::now() >= next_word) {
            say_who_is_missing();
            pause = std::min(2 * pause, std::chrono::milliseconds(kLongestSilenceMs));
            next_word = Clock::now() + pause;
        }
        n_missing = 0;
        for (std::size_t s = 0; s < peers_.size(); ++s) {
            if (peers_[s].up) continue;
            RETURN_IF_ERROR(stop_if_asked());
            Status greeted = greet(s, Deadline::after_ms(kGreetMs));
            if (greeted.has_value()) continue;
            if (!is_absence(greeted.error())) return greeted;
            ++n_missing;
            Result<msg::Pong> pong = peers_[s].channel->ping(Deadline::after_ms(kGreetMs));
            if (pong.has_value() && pong->state == msg::State::loading)
                patience[s] = Deadline::after_ms(options_.wait_ms);
            if (patience[s].expired()) return greeted;
        }
    }
    return directory_.check_coverage();
}

void ExpertServers::refresh(std::int64_t patience_ms) {
    const std::uint64_t n_news = heartbeat_->n_news();
    const bool is_news = std::exchange(seen_news_, n_news) != n_news;
    for (std::size_t s = 0; s < peers_.size(); ++s) {
        Peer& peer = peers_[s];
        if (!peer.up) {
            if (is_news || Clock::now() >= peer.next_try) try_again(s, patience_ms);
            continue;
        }
        if (!is_news && peer.is_heard) continue;
        const Vitals vitals = heartbeat_->look(s);
        const std::string name = directory_.name(s);
        peer.is_heard = vitals.instance != 0 || vitals.is_foreign;
        // It may end before the heartbeat has met it. What was found before it was greeted says
        // nothing then: it had not started.
        const bool is_gone = peer.is_heard ? !vitals.answers
                                           : vitals.door == Vitals::Door::refuses &&
                                                 vitals.door_at > peer.greeted_at;
        const bool is_silent =
            peer.is_heard ? vitals.is_silent
                          : vitals.door == Vitals::Door::silent && vitals.door_at > peer.greeted_at;
        if (is_silent) {
            n_silent_.fetch_add(1, std::memory_order_relaxed);
            lose(s, describe_silence(name, vitals.silent_ms, vitals.door));
        } else if (is_gone) {
            lose(s, Error{ErrorCode::unavailable, name + " has closed the connection",
                          "start it again, if no launcher does"});
        }
    }
}

bool ExpertServers::is_worth_greeting(const Peer& peer, const Vitals& vitals) const {
    const bool is_there = vitals.is_foreign ||  // to be refused for it, and named
                          (vitals.answers && vitals.state == msg::State::ready);
    if (!is_there || vitals.is_silent) return false;
    if (peer.refusal && vitals.instance == peer.refused) return false;
    const bool is_stuck = vitals.instance == peer.stuck && vitals.stalled_ms >= kAliveMs;
    return !is_stuck;
}

void ExpertServers::try_again(std::size_t server, std::int64_t patience_ms) {
    Peer& peer = peers_[server];
    peer.next_try = Clock::now() + std::chrono::milliseconds(kTryAgainMs);
    const Vitals vitals = heartbeat_->look(server);
    if (!is_worth_greeting(peer, vitals)) return;
    const Status greeted = greet(server, Deadline::after_ms(patience_ms));
    if (greeted.has_value()) {
        log::info(directory_.name(server) + " is back after " + seconds(ms_since(peer.lost_at)));
        const bool is_somebody_down =
            std::any_of(peers_.begin(), peers_.end(), [](const Peer& other) { return !other.up; });
        peer.trouble =
            is_somebody_down || directory_.unheld().empty()
                ? std::string()
                : "came back with another share or placement than it had: " + directory_.unheld();
        if (!peer.trouble.empty())
            log::warn(directory_.name(server) + " " + peer.trouble +
                      "; start it with the former one, or the whole pipeline with the new one");
        tell_coverage();
    } else if (!is_absence(greeted.error())) {
        directory_.withdraw(server);
        peer.refused = vitals.instance;
        peer.refusal = greeted.error();
        peer.trouble = "is back and not used: " +
                       without_name(greeted.error().message, options_.endpoints[server], "it ");
        log::warn("not using a server that came back: " + greeted.error().sentence());
        tell_coverage();
    }
}

void ExpertServers::wait_for_news(std::int64_t ms) const {
    heartbeat_->wait_for_news(seen_news_, Deadline::after_ms(ms));
}

// ---- trouble -----------------------------------------------------------------------------------

std::optional<Error> ExpertServers::verdict(std::size_t server, const Waiting& call) {
    const std::int64_t age_ms = ms_since(call.sent_at);
    if (age_ms < call.deadline_ms) return std::nullopt;
    const Vitals vitals = heartbeat_->look(server);
    const std::string name = directory_.name(server);
    const std::int64_t patience_ms = kSilenceMs + call.deadline_ms;
    if (vitals.instance != 0 && vitals.silent_ms >= patience_ms) {
        n_silent_.fetch_add(1, std::memory_order_relaxed);
        return describe_silence(name, vitals.silent_ms, vitals.door);
    }
    const std::int64_t silent_ms = peers_[server].channel->silent_ms();
    if (silent_ms >= patience_ms) {
        n_silent_.fetch_add(1, std::memory_order_relaxed);
        if (vitals.instance == 0 || vitals.silent_ms >= kAliveMs)
            return describe_silence(name, silent_ms, vitals.door);
        return Error{ErrorCode::unavailable,
                     name + " answers, but nothing has come through the connection of " +
                         call.what + " for " + seconds(silent_ms),
                     "check what lies between the boxes and forgets connections"};
    }
    const std::int64_t stalled_ms = std::min(vitals.stalled_ms, age_ms);
    if (vitals.waits_for_reads ||
        stalled_ms < std::max(options_.stuck_ms, kStuckDeadlines * call.deadline_ms))
        return std::nullopt;
    n_stuck_.fetch_add(1, std::memory_order_relaxed);
    peers_[server].stuck = vitals.instance;
    return Error{ErrorCode::unavailable,
                 name + " is stuck: its connection answers, but it has computed nothing for " +
                     seconds(stalled_ms) + " (" + call.what + ")",
                 "restart it; its stack (gdb -p) shows where it hangs"};
}

void ExpertServers::tell_late(std::size_t server, const Waiting& call) {
    const std::int64_t age_ms = ms_since(call.sent_at);
    if (age_ms < call.deadline_ms + kLateMs) return;
    if (told_late_ != Clock::time_point() && ms_since(told_late_) < kTellLateMs) return;
    const Vitals vitals = heartbeat_->look(server);
    if (vitals.silent_ms >= kAliveMs) return;  // its end, or a verdict, will say more
    told_late_ = Clock::now();
    log::warn(directory_.name(server) + " is slow: " + call.what + " have taken " +
              seconds(age_ms) + ", late after " + seconds(call.deadline_ms) + "; it " +
              (vitals.waits_for_reads ? "waits for its disk"
               : vitals.stalled_ms < kAliveMs
                   ? "computes"
                   : "has computed nothing for " + seconds(std::min(vitals.stalled_ms, age_ms))));
}

void ExpertServers::collect_debts() {
    for (std::size_t s = 0; s < peers_.size(); ++s) {
        Peer& peer = peers_[s];
        if (peer.owed_call == 0) continue;
        const Deadline now = Deadline::after_ms(0);
        Result<transport::Reply> reply = peer.channel->receive(peer.owed_call, now);
        if (reply.has_value() || reply.error().code != ErrorCode::deadline_exceeded)
            peer.owed_call = 0;  // if its connection has ended, the next call says so
        else if (std::optional<Error> error = verdict(s, peer.owed))
            lose(s, *error);
        else
            tell_late(s, peer.owed);
    }
}

std::optional<Error> ExpertServers::why_unsent(std::size_t server, const Waiting& call,
                                               Error error) {
    if (!peers_[server].channel->is_greeted()) return error;
    return verdict(server, call);
}

void ExpertServers::lose(std::size_t server, const Error& error) {
    Peer& peer = peers_[server];
    if (!peer.up) return;
    peer.up = false;
    peer.channel->forget(std::exchange(peer.owed_call, 0));
    peer.lost_at = Clock::now();
    peer.next_try = peer.lost_at + std::chrono::milliseconds(kTryAgainMs);
    peer.trouble = without_name(error.message, options_.endpoints[server], "");
    peer.channel->give_up(peer.trouble);
    n_up_.fetch_sub(1, std::memory_order_relaxed);
    n_losses_.fetch_add(1, std::memory_order_relaxed);
    const bool has_replicas = directory_.is_covered_by(available());
    log::warn("lost " + directory_.name(server) + ": " + peer.trouble +
              (has_replicas ? "; others go on with its experts" : "; waiting for it") +
              (error.remedy.empty() ? "" : ": " + error.remedy));
    tell_coverage();
}

void ExpertServers::tell_coverage() {
    const bool is_covered = directory_.is_covered_by(available());
    if (options_.on_waiting && (!is_covered || !is_covered_))
        options_.on_waiting(is_covered ? std::string() : absent());
    is_covered_ = is_covered;
}

std::string ExpertServers::absent() const {
    std::string names;
    std::size_t n_absent = 0;
    const bool is_all_held = directory_.unheld().empty();
    for (std::size_t s = 0; s < peers_.size(); ++s) {
        const bool is_there = peers_[s].up && (is_all_held || peers_[s].trouble.empty());
        if (is_there || ++n_absent > kMostNamed) continue;
        if (!names.empty()) names += "; ";
        names += directory_.name(s);
        if (!peers_[s].trouble.empty()) names += ", which " + peers_[s].trouble;
    }
    if (n_absent > kMostNamed) names += fmt::format("; and {} more", n_absent - kMostNamed);
    return names;
}

std::optional<Error> ExpertServers::refusal() const {
    for (const Peer& peer : peers_)
        if (peer.refusal) return peer.refusal;
    return std::nullopt;
}

}  // namespace k3::trunk
