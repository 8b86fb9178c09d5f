#include "common/transport/channel.h"

#include <zmq.h>

#include <algorithm>
#include <deque>
#include <map>
#include <random>
#include <utility>

#include "common/transport/curve_keys.h"
#include "common/transport/endpoint.h"
#include "common/transport/lane_link.h"
#include "common/transport/zmq_link.h"
#include "common/transport/zmtp_greeting.h"

namespace k3::transport {

namespace {

constexpr std::int64_t kSendWaitMs = 1000;  // for room in the socket while the peer is connected
constexpr std::int64_t kAgainMs = 20;  // between two questions to a peer that loads or is not there
constexpr int kCutsToAsk = 2;
constexpr std::int64_t kGreetingMs = 300;
constexpr std::size_t kMaxStoredReplies = 65536;  // of one call, while others are waited for

std::uint64_t random_call_id() {
    std::random_device device;
    return (std::uint64_t{device()} << 16U) | 1U;
}

constexpr const char* kRepeat = "the request can be repeated when it is back";

/// Waiting for the other end of a reply or of a connection.
struct Call {
    std::string name;      // of the request, for sentences
    bool by_lane = false;  // where its reply is waited for
    std::deque<Reply> replies;
    std::optional<Error> failure;
};

}  // namespace

class Channel::Impl {
  public:
    Impl(Options options, Endpoint endpoint)
        : options_(std::move(options)), endpoint_(std::move(endpoint)) {}
    Impl(const Impl&) = delete;
    Impl& operator=(const Impl&) = delete;
    ~Impl() = default;

    const Options& options() const { return options_; }
    bool is_greeted() const noexcept { return greeted_; }
    const std::string& failed_service() const { return failed_service_; }

    /// Remembers whom an error is about, for failed_service().
    template <typename T>
    Result<T> noted(Result<T> result) {
        if (!result.has_value())
            failed_service_ = failure_named_.empty() ? options_.peer : failure_named_;
        failure_named_.clear();
        return result;
    }

    Result<msg::Announcement> hello(const std::vector<msg::SegmentProbe>& probes,
                                    Deadline deadline) {
        pump();
        greeted_ = false;
        close_lane("is given back by a new hello");
        std::optional<msg::Pong> last;
        while (true) {
            const std::uint64_t key = options_.use_lane && !probes.empty() ? lane_key_ : 0;
            Result<msg::Announcement> answer =
                ask<msg::Announcement>(msg::Hello{probes, key}, deadline);
            if (!answer.has_value())
                return last && deadline.expired() ? not_ready(*last) : std::move(answer).error();
            if (answer->state == msg::State::ready) {
                greeted_ = true;
                instance_ = answer->instance;
                open_lane(answer->lane);
                return answer;
            }
            Result<msg::Pong> pong = ask<msg::Pong>(msg::Ping{}, deadline);
            last = pong.has_value() ? *pong : msg::Pong{answer->instance, answer->state};
            if (deadline.expired()) return not_ready(*last);
            pause(deadline);
        }
    }

    Result<msg::Pong> ping(Deadline deadline) {
        pump();
        return ask<msg::Pong>(msg::Ping{}, deadline);
    }

    Result<std::uint64_t> send(msg::Body body, std::vector<msg::Bytes> frames) {
        LaneLink* lane = std::holds_alternative<msg::ExpertCall>(body) ? lane_.get() : nullptr;
        if (lane == nullptr) pump();  // receive() does, while the peer is at work
        if (!greeted_) return not_greeted(msg::name_of(body));
        return put(std::move(body), std::move(frames), Deadline::after_ms(kSendWaitMs), lane);
    }

    void post(msg::Body body) {
        pump();
        if (!greeted_) return;
        msg::Bytes envelope = msg::encode({options_.run_id, 0, std::move(body)});
        std::vector<msg::Bytes> none;
        socket_->send(envelope, none);
    }

    Result<Reply> receive(std::uint64_t call_id, Deadline deadline, bool more) {
        while (true) {
            if (!has_lane_answered(call_id)) pump();
            auto found = calls_.find(call_id);
            if (found == calls_.end())
                return Error{
                    ErrorCode::internal,
                    "call " + std::to_string(call_id) + " is not outstanding at " + where(), ""};
            Call& call = found->second;
            if (!call.replies.empty()) return deliver(found, more);
            if (call.failure) {
                Error error = std::move(*call.failure);
                calls_.erase(found);
                return error;
            }
            watch_liveness();  // also for who only looks now and then
            if (deadline.expired())
                return Error{ErrorCode::deadline_exceeded,
                             where() + " has not answered " + call.name + " in the time granted",
                             "raise the limit, or see what it is doing (k3pipe status)"};
            wait(call.by_lane && lane_ ? static_cast<Link&>(*lane_) : *socket_, deadline, false);
        }
    }

    const Lane& lane() const noexcept { return lane_facts_; }

    bool lane_takes(std::size_t request_bytes, std::size_t reply_bytes) const noexcept {
        return lane_ && lane_->takes(request_bytes, reply_bytes);
    }

    void set_lane_spin_us(std::uint32_t us) noexcept {
        spin_us_ = us;
        if (lane_) lane_->set_spin_us(us);
    }

    void forget(std::uint64_t call_id) noexcept { calls_.erase(call_id); }

    std::int64_t silent_ms() const noexcept {
        if (calls_.empty() || broken_) return 0;
        using std::chrono::milliseconds;
        return std::chrono::duration_cast<milliseconds>(last_pump_ - heard_at_).count();
    }

    void give_up(const std::string& reason) {
        if (socket_ && !broken_) lose(reason);
    }

  private:
    using Calls = std::map<std::uint64_t, Call>;

    std::string where() const { return options_.peer + " (" + options_.endpoint + ")"; }

    Error not_greeted(std::string_view request) const {
        if (lost_reason_.empty())
            return {ErrorCode::unavailable,
                    where() + " has not been greeted before " + std::string(request), "say hello"};
        return {ErrorCode::unavailable, where() + " " + lost_reason_, kRepeat};
    }

    Error not_ready(const msg::Pong& pong) const {
        std::string detail = pong.detail.empty() ? "" : ": " + pong.detail;
        std::string progress =
            pong.state == msg::State::loading
                ? " (" + std::to_string(pong.progress_permille / 10) + " %" + detail + ")"
                : "";
        return {ErrorCode::unavailable,
                where() + " is not ready in the time granted: it is " +
                    std::string(msg::to_string(pong.state)) + progress,
                "wait longer, or see its log"};
    }

    // ---- the socket -------------------------------------------------------------------------

    /// A new socket if there is none that works: each serves one connection.
    void open() {
        if (socket_ && !broken_) return;
        socket_.reset();
        broken_ = false;
        socket_ = std::make_unique<ZmqLink>(
            context_, ZmqLink::Options{options_.endpoint, options_.max_message_bytes, ++n_sockets_,
                                       keys_at(endpoint_, options_.keys.get())});
        heard_at_ = Clock::now();
    }

    void open_lane(const msg::LaneOffer& offer) {
        lane_facts_.trouble.clear();
        if (!options_.use_lane || offer.pid == 0) return;
        Result<std::unique_ptr<LaneLink>> opened = LaneLink::open(offer);
        if (!opened.has_value()) {  // the socket always works
            lane_facts_.trouble = opened.error().message;
            return;
        }
        lane_ = std::move(opened).value();
        lane_->set_spin_us(spin_us_);
        lane_facts_.is_open = true;
        Result<CoreSet> cores = parse_cores(offer.cores);  // none: nobody knows, nobody spins
        lane_facts_.peer_cores = {cores.has_value() ? std::move(cores).value() : CoreSet{},
                                  offer.compute_threads};
    }

    /// Goes on without; whoever waits for a reply through it is told to ask again.
    void close_lane(const std::string& reason) {
        if (!lane_) return;
        lane_.reset();
        lane_facts_.is_open = false;
        for (auto& [id, call] : calls_)
            if (call.by_lane && !call.failure && call.replies.empty())
                call.failure = Error{ErrorCode::stale,
                                     "the fast lane to " + where() + " " + reason + " while " +
                                         call.name + " was outstanding",
                                     "the request can be repeated"};
    }

    /// Ends every outstanding call. The socket is given up as well, with all that it still holds.
    void lose(const std::string& reason) {
        greeted_ = false;
        broken_ = true;
        lost_reason_ = reason;
        socket_->give_up();
        lane_.reset();
        lane_facts_.is_open = false;
        for (auto& [id, call] : calls_)
            if (!call.failure)
                call.failure =
                    Error{ErrorCode::unavailable,
                          where() + " " + reason + " while " + call.name + " was outstanding",
                          "the request can be repeated when it is back"};
    }

    /// Takes everything that has arrived, without waiting.
    void pump() {
        const Clock::time_point now = Clock::now();
        // Time in which nobody looked is no silence of the peer: the caller was elsewhere, or the
        // machine so busy that this thread got no CPU. A wait lasts ping_ms at most.
        if (now - last_pump_ > std::chrono::milliseconds(2 * options_.ping_ms)) heard_at_ = now;
        last_pump_ = now;
        if (!socket_ || broken_) return;
        // The end first: what came before it is then still read below.
        socket_->look();
        Incoming message;
        while (socket_->receive(message)) dispatch(message);
        if (lane_) pump_lane();
        if (!socket_->ended().empty() && !broken_) {
            n_cut_ = socket_->handshake() == ZmqLink::Handshake::cut ? n_cut_ + 1 : 0;
            lose(socket_->ended());
        }
    }

    void pump_lane() {
        Incoming message;
        if (!lane_->receive(message)) {
            const std::string reason = lane_->ended();  // goes with the lane
            if (!reason.empty()) close_lane(reason);
            return;
        }
        // An empty one says that the reply takes the socket.
        if (!message.envelope.empty() && dispatch(message) != lane_call_)
            return close_lane("holds what is no answer");
        auto found = calls_.find(lane_call_);
        if (found != calls_.end()) found->second.by_lane = false;
    }

    /// Looking at the socket as well takes some microseconds, which nobody misses then.
    bool has_lane_answered(std::uint64_t call_id) {
        if (!lane_ || call_id != lane_call_) return false;
        pump_lane();
        auto found = calls_.find(call_id);
        return found != calls_.end() && !found->second.replies.empty();
    }

    void wait(Link& link, Deadline deadline, bool for_room) {
        if (broken_) return pause(deadline);
        link.wait(deadline.min(Deadline::after_ms(
                      std::max<std::int64_t>(1, std::min(options_.ping_ms, options_.liveness_ms)))),
                  for_room);
    }

    void pause(Deadline deadline) {
        ::zmq_poll(nullptr, 0, deadline.min(Deadline::after_ms(kAgainMs)).remaining_ms());
    }

    // ---- questions and answers --------------------------------------------------------------

    /// Hands a message to `lane` (null: none) if that takes it, else to the socket, waiting for
    /// room until `deadline`.
    Result<std::uint64_t> put(msg::Body body, std::vector<msg::Bytes> frames, Deadline deadline,
                              LaneLink* lane) {
        const std::uint64_t call_id = next_call_id_++;
        const std::string name(msg::name_of(body));
        msg::Bytes envelope = msg::encode({options_.run_id, call_id, std::move(body)});
        const bool by_lane = lane != nullptr && lane->send(envelope, frames) == SendOutcome::sent;
        while (!by_lane && socket_->send(envelope, frames) != SendOutcome::sent) {
            if (deadline.expired())
                return Error{ErrorCode::unavailable,
                             where() + " does not take " + name + ": the queue towards it is full",
                             "it may be overloaded; ask again later"};
            wait(*socket_, deadline, true);
            pump();
            if (broken_)
                return Error{ErrorCode::unavailable, where() + " " + lost_reason_, kRepeat};
        }
        // While nothing was asked nobody had to answer: silence begins with the first question.
        if (calls_.empty()) heard_at_ = Clock::now();
        Call& call = calls_[call_id];
        call.name = name;
        call.by_lane = by_lane;
        if (by_lane) {
            lane_call_ = call_id;
            ++lane_facts_.n_sent;
        }
        return call_id;
    }

    /// One question of control, repeated to whoever comes until the deadline.
    template <typename T>
    Result<T> ask(const msg::Body& body, Deadline deadline) {
        while (true) {
            open();
            Result<Reply> reply = ask_once(body, deadline);
            // A connection that ended is no answer; a Failure, of whatever code, is one.
            if (reply.has_value() || (!broken_ && socket_->is_connected()))
                return expect<T>(std::move(reply), where());
            if (auto refusal = key_refusal(deadline)) return *std::move(refusal);
            if (deadline.expired())
                return Error{ErrorCode::unavailable,
                             where() + " " + (broken_ ? lost_reason_ : ZmqLink::kNobody),
                             "check that it runs and that the endpoint is right"};
            if (broken_) pause(deadline);
        }
    }

    /// The error if the last connection ended because of keys: no waiting will change that.
    std::optional<Error> key_refusal(Deadline deadline) const {
        if (!broken_ || endpoint_.kind != Endpoint::Kind::tcp) return std::nullopt;
        ZmqLink::Handshake how = socket_->handshake();
        // One connection may be cut by a peer that ends, and all of them by a proxy.
        if (how == ZmqLink::Handshake::cut && n_cut_ >= kCutsToAsk) {
            const Greeting greeting =
                read_greeting(endpoint_, deadline.min(Deadline::after_ms(kGreetingMs)));
            if (greeting == Greeting::curve)
                how = options_.keys ? ZmqLink::Handshake::bad_keys : ZmqLink::Handshake::no_keys;
            else if (greeting == Greeting::plain && options_.keys)
                how = ZmqLink::Handshake::no_keys;
        }
        if (how == ZmqLink::Handshake::bad_keys)
            return Error{ErrorCode::invalid_argument,
                         where() +
                             " does not accept the keys of this process: it has those of "
                             "another pipeline",
                         "give both the same key file (keys in [pipeline], or --keys)"};
        if (how != ZmqLink::Handshake::no_keys) return std::nullopt;
        if (options_.keys)
            return Error{ErrorCode::invalid_argument,
                         where() + " has no keys, and this process calls nobody without",
                         "give it the key file of the pipeline (--keys)"};
        return Error{ErrorCode::invalid_argument,
                     where() + " serves only who has its keys, and this process has none",
                     "give it the key file of the pipeline (keys in [pipeline], or --keys)"};
    }

    Result<Reply> ask_once(const msg::Body& body, Deadline deadline) {
        ASSIGN_OR_RETURN(std::uint64_t call_id, put(body, {}, deadline, nullptr));
        Result<Reply> reply = receive(call_id, deadline, false);
        forget(call_id);
        return reply;
    }

    Result<Reply> deliver(Calls::iterator found, bool more) {
        Reply reply = std::move(found->second.replies.front());
        found->second.replies.pop_front();
        auto* failure = std::get_if<msg::Failure>(&reply.body);
        if (failure != nullptr || !more) calls_.erase(found);
        if (failure == nullptr) return reply;
        failure_named_ = failure->service.empty() ? options_.peer : failure->service;
        // One that was passed on has been named already where it was first received.
        if (failure->error.message.starts_with(failure_named_)) return std::move(failure->error);
        return std::move(failure->error).with_context(failure_named_);
    }

    /// Returns the call id that the message names.
    std::uint64_t dispatch(Incoming& message) {
        heard_at_ = Clock::now();
        std::uint64_t call_id = 0;
        Result<msg::Envelope> envelope = msg::decode(message.envelope, call_id);
        auto found = calls_.find(call_id);
        if (envelope.has_value() && message.frames.size() > msg::kMaxTensorFrames)
            envelope =
                Error{ErrorCode::invalid_argument,
                      "the reply has " + std::to_string(1 + message.frames.size()) +
                          " frames, the limit is " + std::to_string(1 + msg::kMaxTensorFrames),
                      ""};
        if (!envelope.has_value()) {
            if (found != calls_.end() && !found->second.failure)
                found->second.failure = std::move(envelope).error().with_context(where());
            return call_id;
        }
        if (const auto* pong = std::get_if<msg::Pong>(&envelope->body);
            pong != nullptr && greeted_ && pong->instance != instance_)
            lose("was restarted");
        if (found == calls_.end()) return call_id;
        Call& call = found->second;
        if (call.replies.size() >= kMaxStoredReplies) {
            call.failure = Error{ErrorCode::resource_exhausted,
                                 std::to_string(call.replies.size()) + " replies of " + where() +
                                     " to " + call.name + " wait unread",
                                 "read them as they come"};
            return call_id;
        }
        call.replies.push_back({std::move(envelope->body), std::move(message.frames)});
        return call_id;
    }

    /// Asks for a sign of life when it has been quiet, and gives up after liveness_ms of silence.
    void watch_liveness() {
        if (broken_) return;
        const Clock::time_point now = Clock::now();
        if (now - heard_at_ > std::chrono::milliseconds(options_.liveness_ms)) {
            lose("has been silent for " + std::to_string(options_.liveness_ms) + " ms");
            return;
        }
        const std::chrono::milliseconds interval(options_.ping_ms);
        if (now - heard_at_ < interval || now - pinged_at_ < interval) return;
        pinged_at_ = now;
        // Its own call id is not in calls_: any traffic counts as life, this only provokes some.
        msg::Bytes envelope = msg::encode({options_.run_id, next_call_id_++, msg::Ping{}});
        std::vector<msg::Bytes> none;
        socket_->send(envelope, none);
    }

    const Options options_;
    const Endpoint endpoint_;
    ZmqContext context_;
    std::unique_ptr<ZmqLink> socket_;
    std::unique_ptr<LaneLink> lane_;
    Lane lane_facts_;
    std::uint64_t lane_key_ = random_call_id();
    std::uint64_t lane_call_ = 0;  // the call whose request went through the lane last
    std::uint32_t spin_us_ = 0;
    std::uint64_t n_sockets_ = 0;
    bool greeted_ = false;       // hello was answered by the instance that is connected
    bool broken_ = false;        // the socket's connection has ended: replace it before use
    std::string lost_reason_;    // why the last connection ended
    int n_cut_ = 0;              // connections that ended in their handshake, one after the other
    std::string failure_named_;  // by the Failure that is being delivered
    std::string failed_service_;
    std::uint64_t instance_ = 0;
    std::uint64_t next_call_id_ = random_call_id();
    Calls calls_;
    Clock::time_point heard_at_ = Clock::now();
    Clock::time_point pinged_at_{};
    Clock::time_point last_pump_ = Clock::now();
};

Channel::Channel(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
Channel::~Channel() = default;

Result<std::unique_ptr<Channel>> Channel::create(Options options) {
    Result<Endpoint> endpoint = parse_endpoint(options.endpoint);
    if (!endpoint.has_value()) return std::move(endpoint).error().with_context(options.peer);
    if (endpoint->port == "*" || endpoint->port == "0")
        return Error{ErrorCode::invalid_argument,
                     options.peer + ": endpoint " + options.endpoint + " names no port to call",
                     "write the port that the service listens on"};
    return std::unique_ptr<Channel>(
        new Channel(std::make_unique<Impl>(std::move(options), std::move(endpoint).value())));
}

Result<msg::Announcement> Channel::hello(const std::vector<msg::SegmentProbe>& probes,
                                         Deadline deadline) {
    return impl_->noted(impl_->hello(probes, deadline));
}
bool Channel::is_greeted() const noexcept { return impl_->is_greeted(); }
Result<msg::Pong> Channel::ping(Deadline deadline) { return impl_->noted(impl_->ping(deadline)); }
Result<std::uint64_t> Channel::send(msg::Body body, std::vector<msg::Bytes> frames) {
    return impl_->noted(impl_->send(std::move(body), std::move(frames)));
}
void Channel::post(msg::Body body) { impl_->post(std::move(body)); }
Result<Reply> Channel::receive(std::uint64_t call_id, Deadline deadline, bool more) {
    return impl_->noted(impl_->receive(call_id, deadline, more));
}
std::int64_t Channel::silent_ms() const noexcept { return impl_->silent_ms(); }
void Channel::give_up(const std::string& reason) { impl_->give_up(reason); }
void Channel::forget(std::uint64_t call_id) noexcept { impl_->forget(call_id); }

Result<Reply> Channel::call(msg::Body body, std::vector<msg::Bytes> frames, Deadline deadline) {
    ASSIGN_OR_RETURN(std::uint64_t call_id, send(std::move(body), std::move(frames)));
    Result<Reply> reply = receive(call_id, deadline);
    impl_->forget(call_id);
    return reply;
}

const std::string& Channel::failed_service() const noexcept { return impl_->failed_service(); }
const Channel::Lane& Channel::lane() const noexcept { return impl_->lane(); }
bool Channel::lane_takes(std::size_t request_bytes, std::size_t reply_bytes) const noexcept {
    return impl_->lane_takes(request_bytes, reply_bytes);
}
void Channel::set_lane_spin_us(std::uint32_t us) noexcept { impl_->set_lane_spin_us(us); }
const Channel::Options& Channel::options() const noexcept { return impl_->options(); }

}  // namespace k3::transport
