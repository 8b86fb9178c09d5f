#include "tests/support/message_fuzzer.h"

#include <unistd.h>
#include <zmq.h>

#include <algorithm>
#include <memory>
#include <optional>
#include <set>
#include <string_view>
#include <utility>

#include "common/base/deadline.h"
#include "common/transport/arena.h"
#include "common/transport/curve_guard.h"
#include "common/transport/lane_segment.h"
#include "common/transport/zmq_socket.h"
#include "tests/support/message_mutator.h"
#include "tests/support/sample_messages.h"

namespace k3::test {

namespace {

constexpr std::int64_t kSendMs = 20000;
constexpr std::int64_t kControlMs = 20000;
constexpr std::uint64_t kControlCall = std::uint64_t{1} << 63U;

using transport::LaneSegment;
using transport::LaneSlot;

using transport::SendOutcome;

struct Message {
    msg::Bytes envelope;
    std::vector<msg::Bytes> frames;
};

/// The caller's end of a fast lane, without the care that a Channel takes.
class FuzzLane {
  public:
    /// `hello` sends one and returns the announcement that came back.
    template <typename Hello>
    explicit FuzzLane(Hello hello) {
        const auto run = static_cast<std::uint64_t>(::getpid());
        auto arena =
            transport::Arena::create({transport::segment_name(run, "fuzz"), std::size_t{4096}, 1});
        if (!arena.has_value()) return;
        arena_ = std::move(arena).value();  // as long as it is there, the lane is ours
        const std::optional<msg::Announcement> peer = hello(msg::Hello{{arena_->probe()}, kKey});
        if (!peer || peer->lane.pid == 0) return;
        offer_ = peer->lane;
        auto segment = LaneSegment::open(offer_);
        if (segment.has_value()) segment_.emplace(std::move(segment).value());
    }
    bool is_open() const { return segment_.has_value(); }

    static bool takes(const LaneSlot& slot, const msg::Bytes& envelope,
                      const std::vector<msg::Bytes>& frames) {
        return frames.size() <= transport::kMaxLaneFrames &&
               slot.fits(LaneSlot::size_of(envelope, frames));
    }

    /// Sends and waits for the answer, for a moment: many a request deserves none.
    std::optional<msg::Envelope> ask(const msg::Bytes& envelope,
                                     const std::vector<msg::Bytes>& frames,
                                     MessageMutator* random) {
        const LaneSlot request = segment_->request(offer_.index);
        const LaneSlot reply = segment_->reply(offer_.index);
        if (!takes(request, envelope, frames)) return std::nullopt;
        ++number_;
        request.put(number_, offer_.token, envelope, frames);
        if (random != nullptr && random->below(4) == 0) damage_head(request, *random);
        transport::set_and_wake(segment_->bell(), 1);
        const Deadline deadline = Deadline::after_ms(random == nullptr ? kControlMs : 5);
        while (reply.head().number.value != number_ && !deadline.expired())
            transport::sleep_on(reply.head().number, reply.head().number.value, deadline);
        if (reply.head().number.value != number_) return std::nullopt;
        msg::Bytes buffer;
        transport::Incoming message;
        std::uint64_t call_id = 0;
        if (!reply.take(number_, buffer, message).has_value()) return std::nullopt;
        auto answer = msg::decode(message.envelope, call_id);
        return answer.has_value() ? std::optional(std::move(answer).value()) : std::nullopt;
    }

  private:
    static constexpr std::uint64_t kKey = 0xF022;

    void damage_head(const LaneSlot& slot, MessageMutator& random) {
        transport::LaneHead& head = slot.head();
        const auto word = static_cast<std::uint32_t>(random.below(std::uint64_t{1} << 32U));
        switch (random.below(6)) {
            case 0:
                head.token ^= word;
                return;
            case 1:
                head.envelope_bytes = word;
                return;
            case 2:
                head.n_frames = word;
                return;
            case 3:
                head.frame_bytes[random.below(transport::kMaxLaneFrames)] = word;
                return;
            case 4:
                head.spin_us = word;
                return;
            default:
                number_ = word;
                head.number.value = number_;
                return;
        }
    }

    std::unique_ptr<transport::Arena> arena_;
    msg::LaneOffer offer_;
    std::optional<LaneSegment> segment_;
    std::uint32_t number_ = 0;
};

class Fuzzer {
  public:
    explicit Fuzzer(const FuzzOptions& options)
        : options_(options), random_(options.seed), socket_(context_, ZMQ_DEALER) {}

    FuzzReport run() {
        collect_requests();
        if (options_.keys) transport::call_with_keys(socket_, *options_.keys);
        if (socket_.connect(options_.endpoint) != 0) {
            report_.problem = "cannot connect to " + options_.endpoint;
            return report_;
        }
        const std::optional<msg::Pong> before = ping();
        if (!before || before->state != msg::State::ready) {
            report_.problem = options_.endpoint + " was not ready before the first message";
            return report_;
        }
        if (!(options_.by_lane ? send_by_lane() : send_all())) return report_;
        drop_sessions();
        settle(*before);
        return report_;
    }

  private:
    bool send_all() {
        for (int i = 0; i < options_.n_messages; ++i) {
            if (!send(next_message())) return false;
            ++report_.n_sent;
            drain();
        }
        return true;
    }

    /// Ends with a sound request in a lane that was greeted anew.
    bool send_by_lane() {
        const auto hello = [this](msg::Hello greeting) { return greet(std::move(greeting)); };
        {
            FuzzLane lane(hello);
            for (int i = 0; lane.is_open() && i < options_.n_messages; ++i) {
                const Message message = next_message();
                if (lane.ask(message.envelope, message.frames, &random_)) ++report_.n_lane_answers;
                ++report_.n_sent;
                drain();
            }
        }
        FuzzLane lane(hello);
        const FuzzRequest& sound = options_.requests.front();
        std::optional<msg::Envelope> answer;
        if (lane.is_open())
            answer = lane.ask(msg::encode({0, ++call_id_, sound.body}), sound.frames, nullptr);
        if (answer && !std::holds_alternative<msg::Failure>(answer->body)) return true;
        report_.problem = "the lane does not answer a sound request";
        return false;
    }

    std::optional<msg::Announcement> greet(msg::Hello hello) {
        std::optional<msg::Body> reply = ask(std::move(hello));
        auto* peer = reply ? std::get_if<msg::Announcement>(&*reply) : nullptr;
        return peer != nullptr ? std::optional(std::move(*peer)) : std::nullopt;
    }

    void collect_requests() {
        requests_ = options_.requests;
        for (SampleMessage& sample : sample_messages())
            requests_.push_back({std::move(sample.envelope.body), {}});
    }

    /// The service's own requests come half of the time: they reach further into it.
    const FuzzRequest& pick() {
        const std::size_t n_own = options_.requests.size();
        if (n_own > 0 && random_.below(2) == 0) return requests_[random_.below(n_own)];
        return requests_[random_.below(requests_.size())];
    }

    Message next_message() {
        const FuzzRequest& request = pick();
        msg::Envelope envelope{0, ++call_id_, request.body};
        Message out{{}, request.frames};
        const std::uint64_t kind = random_.below(8);
        if (kind < 4) {
            out.envelope = random_.damage(msg::encode(envelope));
        } else {
            if (kind < 7) envelope = random_.out_of_range(std::move(envelope));
            out.envelope = msg::encode(envelope);
            if (kind >= 6) spoil_frames(out.frames);
        }
        make_harmless(out.envelope);
        return out;
    }

    void spoil_frames(std::vector<msg::Bytes>& frames) {
        switch (random_.below(4)) {
            case 0:
                frames.clear();
                return;
            case 1:
                for (msg::Bytes& frame : frames) frame.resize(random_.below(frame.size() + 9));
                return;
            case 2:
                frames.resize(frames.size() + random_.below(70), msg::Bytes(random_.below(100)));
                return;
            default:
                frames.insert(frames.begin(), msg::Bytes(random_.below(2000)));
                return;
        }
    }

    void make_harmless(msg::Bytes& bytes) {
        std::uint64_t hint = 0;
        Result<msg::Envelope> envelope = msg::decode(bytes, hint);
        if (!envelope.has_value()) return;
        if (std::holds_alternative<msg::Shutdown>(envelope->body)) envelope->body = msg::Ping{};
        if (auto* submit = std::get_if<msg::Submit>(&envelope->body))
            submit->max_tokens = std::clamp<std::uint32_t>(submit->max_tokens, 1, 2);
        if (const auto* open = std::get_if<msg::OpenSession>(&envelope->body))
            sessions_.insert(open->session);
        if (const auto* load = std::get_if<msg::LoadSession>(&envelope->body))
            sessions_.insert(load->session);
        if (const auto* fork = std::get_if<msg::ForkSession>(&envelope->body))
            sessions_.insert(fork->target);
        // No reply must look like one of ours below.
        if (envelope->call_id >= kControlCall) envelope->call_id -= kControlCall;
        bytes = msg::encode(*envelope);
    }

    bool send(Message message) {
        const Deadline deadline = Deadline::after_ms(kSendMs);
        while (socket_.send({}, message.envelope, message.frames) != SendOutcome::sent) {
            if (deadline.expired()) {
                report_.problem = "the service took no message for " + std::to_string(kSendMs) +
                                  " ms after " + std::to_string(report_.n_sent);
                return false;
            }
            wait(ZMQ_POLLIN | ZMQ_POLLOUT, 20);
            drain();
        }
        return true;
    }

    void wait(int events, long ms) {
        zmq_pollitem_t item{socket_.get(), 0, static_cast<short>(events), 0};
        ::zmq_poll(&item, 1, ms);
    }

    /// Counts what has come back; keeps the answer to the control call that is asked for.
    std::optional<msg::Body> drain(std::uint64_t wanted = 0) {
        while (std::optional<std::vector<msg::Bytes>> frames = socket_.receive()) {
            std::uint64_t hint = 0;
            Result<msg::Envelope> reply = msg::decode((*frames)[0], hint);
            if (reply.has_value() && wanted != 0 && reply->call_id == wanted)
                return std::move(reply->body);
            const bool failure =
                reply.has_value() && std::holds_alternative<msg::Failure>(reply->body);
            ++(failure ? report_.n_failures : report_.n_answers);
        }
        return std::nullopt;
    }

    std::optional<msg::Body> ask(msg::Body body) {
        const std::uint64_t call_id = kControlCall + ++call_id_;
        if (!send({msg::encode({0, call_id, std::move(body)}), {}})) return std::nullopt;
        const Deadline deadline = Deadline::after_ms(kControlMs);
        while (!deadline.expired()) {
            if (std::optional<msg::Body> reply = drain(call_id)) return reply;
            wait(ZMQ_POLLIN, 20);
        }
        return std::nullopt;
    }

    std::optional<msg::Pong> ping() {
        std::optional<msg::Body> reply = ask(msg::Ping{});
        const auto* pong = reply ? std::get_if<msg::Pong>(&*reply) : nullptr;
        return pong != nullptr ? std::optional(*pong) : std::nullopt;
    }

    void drop_sessions() {
        for (std::uint64_t session : sessions_)
            if (!send({msg::encode({0, ++call_id_, msg::DropSession{session}}), {}})) return;
    }

    static int counter(const msg::Statistics& statistics, std::string_view name) {
        for (const auto& counter : statistics.counters)
            if (counter.name == name) return static_cast<int>(counter.value);
        return 0;
    }

    void settle(const msg::Pong& before) {
        const Deadline deadline = Deadline::after_ms(options_.settle_ms);
        while (report_.problem.empty()) {
            const std::optional<msg::Pong> pong = ping();
            std::optional<msg::Body> reply = ask(msg::GetStatistics{});
            const auto* statistics = reply ? std::get_if<msg::Statistics>(&*reply) : nullptr;
            if (!pong || statistics == nullptr)
                report_.problem = "the service does not answer any more";
            else if (pong->instance != before.instance)
                report_.problem = "the service was restarted in between";
            else if (pong->state != msg::State::ready)
                report_.problem = "the service is " + std::string(msg::to_string(pong->state));
            else if (statistics->queued == 0)
                report_.alive = true;
            else if (deadline.expired())
                report_.problem = std::to_string(statistics->queued) +
                                  " requests still wait in the service's queue";
            if (statistics != nullptr)
                report_.n_malformed = counter(*statistics, "transport_malformed_messages");
            if (report_.alive) return;
            ::zmq_poll(nullptr, 0, 10);
        }
    }

    const FuzzOptions& options_;
    MessageMutator random_;
    transport::ZmqContext context_;
    transport::ZmqSocket socket_;
    std::vector<FuzzRequest> requests_;
    std::set<std::uint64_t> sessions_;
    std::uint64_t call_id_ = 0;
    FuzzReport report_;
};

}  // namespace

FuzzReport fuzz_service(const FuzzOptions& options) { return Fuzzer(options).run(); }

}  // namespace k3::test
