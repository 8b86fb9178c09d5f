#include "common/transport/heartbeat.h"

#include <sys/eventfd.h>
#include <unistd.h>
#include <zmq.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <utility>

#include "common/transport/curve_keys.h"
#include "common/transport/messages/envelope.h"

namespace k3::transport {

using std::chrono::milliseconds;

namespace {

constexpr std::int64_t kFirstPauseMs = 20;     // before connecting again, doubled each time
constexpr std::int64_t kLongestPauseMs = 200;  // a restarted process is met this late at most
// A connection that is refused ends at once; one to which nothing comes back, when ZeroMQ gives up.
constexpr std::int64_t kSilentDoorMs = 700;
constexpr std::int64_t kDoubtfulMs = 50;  // between looks at a peer that is silent
constexpr std::int64_t kAgainMs = 50;  // after an attempt that has ended early for the first time
constexpr std::int64_t kSecondMs = 2000;  // how long a second connection may take to answer
constexpr std::int64_t kLongestSecondPauseMs = 10'000;
constexpr std::int64_t kMostOwnDelayMs = 100;  // of this thread, that counts as silence of peers
constexpr std::size_t kMaxMessageBytes = std::size_t{1} << 20U;

std::int64_t ms_between(Clock::time_point from, Clock::time_point to) {
    return std::chrono::duration_cast<milliseconds>(to - from).count();
}

std::int64_t back_off_ms(int n_ended, std::int64_t longest) {
    return std::min(longest, kFirstPauseMs << std::min(n_ended, 16));
}

}  // namespace

Result<std::unique_ptr<Heartbeat>> Heartbeat::start(Options options) {
    Fd wake(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
    if (!wake.valid())
        return Error{ErrorCode::io, std::string("cannot make an event: ") + std::strerror(errno),
                     "raise the limit of open files (ulimit -n)"};
    std::unique_ptr<Heartbeat> heartbeat(new Heartbeat(std::move(options), std::move(wake)));
    heartbeat->thread_ = std::thread([self = heartbeat.get()] { self->run(); });
    return heartbeat;
}

Heartbeat::Heartbeat(Options options, Fd wake)
    : options_(std::move(options)), wake_(std::move(wake)), peers_(options_.endpoints.size()) {
    const Clock::time_point now = Clock::now();
    for (std::size_t i = 0; i < peers_.size(); ++i) {
        peers_[i].endpoint = options_.endpoints[i];
        peers_[i].heard_at = peers_[i].worked_at = peers_[i].next_open = now;
    }
}

Heartbeat::~Heartbeat() {
    const std::uint64_t one = 1;
    [[maybe_unused]] ssize_t n = ::write(wake_.get(), &one, sizeof(one));
    thread_.join();
}

Vitals Heartbeat::look(std::size_t i) const {
    std::lock_guard lock(mutex_);
    const Peer& peer = peers_[i];
    Vitals vitals = peer.vitals;
    vitals.silent_ms = std::max<std::int64_t>(0, ms_between(peer.heard_at, looked_at_));
    vitals.stalled_ms = std::max<std::int64_t>(0, ms_between(peer.worked_at, looked_at_));
    return vitals;
}

void Heartbeat::wait_for_news(std::uint64_t seen, Deadline deadline) const {
    std::unique_lock lock(mutex_);
    news_.wait_until(lock, deadline.at(), [&] { return n_news_ > seen; });
}

void Heartbeat::tell_locked() {
    ++n_news_;
    news_.notify_all();
}

// ---- the thread --------------------------------------------------------------------------------

void Heartbeat::run() {
    std::vector<zmq_pollitem_t> items;
    while (true) {
        const Clock::time_point now = Clock::now();
        note_silence(now);
        Clock::time_point next = now + milliseconds(options_.ping_ms);
        items.assign({{nullptr, wake_.get(), ZMQ_POLLIN, 0}});
        for (Peer& peer : peers_) {
            next = std::min(next, tend(peer, now));
            for (const auto& link : {peer.link.get(), peer.second.get()}) {
                if (link == nullptr) continue;
                for (void* socket : link->sockets()) items.push_back({socket, 0, ZMQ_POLLIN, 0});
            }
        }
        pause_ms_ = std::max<std::int64_t>(1, ms_between(now, next));
        ::zmq_poll(items.data(), static_cast<int>(items.size()), pause_ms_);
        if ((items[0].revents & ZMQ_POLLIN) != 0) break;
    }
    peers_.clear();  // the links, before their context
}

/// Time in which this thread got no CPU is no silence of anybody: the answers may lie unread.
void Heartbeat::note_silence(Clock::time_point now) {
    std::lock_guard lock(mutex_);
    const std::int64_t late_ms = ms_between(looked_at_, now) - pause_ms_;
    if (late_ms > kMostOwnDelayMs) {
        for (Peer& peer : peers_) {
            peer.heard_at = std::min(now, peer.heard_at + milliseconds(late_ms));
            peer.worked_at = std::min(now, peer.worked_at + milliseconds(late_ms));
        }
    }
    looked_at_ = now;
    for (Peer& peer : peers_) {
        if (peer.vitals.is_silent || ms_between(peer.heard_at, now) < options_.silence_ms) continue;
        peer.vitals.is_silent = true;
        tell_locked();
    }
}

/// Returns when it wants to be looked after again.
Clock::time_point Heartbeat::tend(Peer& peer, Clock::time_point now) {
    tend_link(peer, now);
    tend_second(peer, now);
    Clock::time_point next = peer.link ? peer.next_ping : peer.next_open;
    if (peer.link && !peer.link->is_connected()) next = now + milliseconds(kDoubtfulMs);
    if (peer.link) {
        const Clock::time_point doubted = peer.heard_at + milliseconds(options_.doubt_ms);
        next = std::min(next, std::max(now + milliseconds(kDoubtfulMs), doubted));
    }
    return next;
}

void Heartbeat::tend_link(Peer& peer, Clock::time_point now) {
    if (!peer.link) {
        if (now < peer.next_open) return;
        peer.link = open(peer);
        peer.opened_at = now;
        peer.next_ping = now + milliseconds(options_.ping_ms);
        return;
    }
    // The end first: what came before it is then still read.
    peer.link->look();
    bool has_answered = false;
    listen(peer, *peer.link, has_answered);
    if (has_answered) {
        peer.second.reset();
        peer.next_second = now;  // the pauses of an earlier silence are over
    }
    if (peer.link->ended().empty()) {
        if (!peer.link->is_connected() && ms_between(peer.opened_at, now) >= kSilentDoorMs)
            set_door(peer, Vitals::Door::silent, peer.opened_at);
        if (now < peer.next_ping || !peer.link->is_connected()) return;
        ping(*peer.link);
        peer.next_ping = now + milliseconds(options_.ping_ms);
        return;
    }
    const bool was_accepted = peer.link->is_connected();
    const bool was_silent = ms_between(peer.opened_at, now) >= kSilentDoorMs;
    peer.link.reset();
    peer.second.reset();
    {
        std::lock_guard lock(mutex_);
        const bool was_foreign = std::exchange(peer.vitals.is_foreign, false);
        if (std::exchange(peer.vitals.answers, false) || was_foreign) {
            peer.n_ended = 0;
            tell_locked();
        }
    }
    // How an accepted connection ends says nothing about the next one.
    if (!was_accepted)
        set_door(peer, was_silent ? Vitals::Door::silent : Vitals::Door::refuses, peer.opened_at);
    peer.next_open = now + milliseconds(back_off_ms(peer.n_ended++, kLongestPauseMs));
}

void Heartbeat::tend_second(Peer& peer, Clock::time_point now) {
    if (!peer.link || !peer.link->is_connected() || silence_ms(peer, now) < options_.doubt_ms) {
        peer.second.reset();
        return;
    }
    if (!peer.second) {
        if (now < peer.next_second) return;
        peer.second = open(peer);
        peer.second_opened_at = now;
        return;
    }
    peer.second->look();
    bool has_answered = false;
    listen(peer, *peer.second, has_answered);
    if (has_answered) {
        peer.link = std::move(peer.second);
        peer.next_second = now;
        peer.opened_at = now;
        peer.n_ended = 0;
        return;
    }
    const std::int64_t age_ms = ms_between(peer.second_opened_at, now);
    const bool has_ended = !peer.second->ended().empty();
    if (peer.second->is_connected())
        set_door(peer, Vitals::Door::accepts, peer.second_opened_at);
    else if (age_ms >= kSilentDoorMs)
        set_door(peer, Vitals::Door::silent, peer.second_opened_at);
    else if (has_ended)
        set_door(peer, Vitals::Door::refuses, peer.second_opened_at);
    if (!has_ended && age_ms < kSecondMs) return;
    peer.second.reset();
    const std::int64_t pause_ms = back_off_ms(4 + peer.n_ended++, kLongestSecondPauseMs);
    peer.next_second = now + milliseconds(peer.n_refusals == 1 ? kAgainMs : pause_ms);
}

void Heartbeat::listen(Peer& peer, ZmqLink& link, bool& has_answered) {
    Incoming message;
    while (link.receive(message)) {
        std::uint64_t call_id = 0;
        Result<msg::Envelope> envelope = msg::decode(message.envelope, call_id);
        if (!envelope.has_value()) {
            // Anything else is for the channel to judge, which says hello before it calls.
            if (envelope.error().code != ErrorCode::incompatible) continue;
            take_foreign(peer);
            has_answered = true;
            continue;
        }
        const auto* pong = std::get_if<msg::Pong>(&envelope->body);
        if (pong == nullptr) continue;
        take_pong(peer, *pong);
        has_answered = true;
    }
}

void Heartbeat::take_pong(Peer& peer, const msg::Pong& pong) {
    const Clock::time_point now = Clock::now();
    std::lock_guard lock(mutex_);
    Vitals& vitals = peer.vitals;
    const bool is_news = !vitals.answers || vitals.is_silent || vitals.instance != pong.instance ||
                         vitals.state != pong.state;
    if (peer.work != pong.work || vitals.instance != pong.instance || pong.work == 0)
        peer.worked_at = now;
    peer.work = pong.work;
    peer.heard_at = now;
    peer.n_ended = 0;
    vitals.answers = true;
    vitals.is_foreign = false;
    vitals.is_silent = false;
    vitals.instance = pong.instance;
    vitals.state = pong.state;
    vitals.waits_for_reads = pong.waits_for_reads;
    vitals.door = Vitals::Door::unknown;
    if (is_news) tell_locked();
}

void Heartbeat::take_foreign(Peer& peer) {
    std::lock_guard lock(mutex_);
    Vitals& vitals = peer.vitals;
    peer.heard_at = peer.worked_at = Clock::now();
    peer.n_ended = 0;
    const bool is_news = !std::exchange(vitals.is_foreign, true);
    vitals.answers = false;
    vitals.is_silent = false;
    vitals.instance = 0;
    vitals.door = Vitals::Door::unknown;
    if (is_news) tell_locked();
}

void Heartbeat::set_door(Peer& peer, Vitals::Door door, Clock::time_point begun) {
    // Once is not enough: an attempt fails as early when the system just then gives up looking for
    // the box's hardware address. It looks for seconds, so the next attempt tells.
    peer.n_refusals = door == Vitals::Door::refuses ? peer.n_refusals + 1 : 0;
    if (peer.n_refusals == 1) return;
    std::lock_guard lock(mutex_);
    peer.vitals.door_at = begun;
    if (std::exchange(peer.vitals.door, door) != door) tell_locked();
}

std::unique_ptr<ZmqLink> Heartbeat::open(const Peer& peer) {
    auto link = std::make_unique<ZmqLink>(
        context_, ZmqLink::Options{peer.endpoint, kMaxMessageBytes, ++n_links_,
                                   keys_at(*parse_endpoint(peer.endpoint), options_.keys.get())});
    ping(*link);
    return link;
}

void Heartbeat::ping(ZmqLink& link) {
    msg::Bytes envelope = msg::encode({options_.run_id, next_call_id_++, msg::Ping{}});
    std::vector<msg::Bytes> none;
    link.send(envelope, none);
}

std::int64_t Heartbeat::silence_ms(const Peer& peer, Clock::time_point now) const {
    std::lock_guard lock(mutex_);
    return ms_between(peer.heard_at, now);
}

}  // namespace k3::transport
