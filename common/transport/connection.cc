// The connection thread of a Server: the only user of its socket.

#include <poll.h>
#include <unistd.h>
#include <zmq.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <fstream>
#include <utility>

#include "common/transport/arena.h"
#include "common/transport/exit_files.h"
#include "common/transport/server_impl.h"
#include "common/transport/stop_signals.h"

namespace k3::transport {

namespace {

constexpr int kIdleMs = 500;
constexpr int kRetryMs = 1;  // a ROUTER cannot say when one of its clients has room again
constexpr int kMessagesPerRound = 64;
constexpr std::size_t kMaxFrames = 1 + msg::kMaxTensorFrames;
constexpr std::int64_t kLastFlushMs = 500;

std::uint64_t resident_bytes() {
    std::ifstream file("/proc/self/statm");
    std::uint64_t total = 0;
    std::uint64_t resident = 0;
    file >> total >> resident;
    return resident * static_cast<std::uint64_t>(::sysconf(_SC_PAGESIZE));
}

Error not_a_request(std::string_view name) {
    return {ErrorCode::invalid_argument, std::string(name) + " is a reply, not a request",
            "check that the client speaks k3pipe's protocol (proto/README.md)"};
}

}  // namespace

void ServerImpl::run() {
    while (!finish_.load()) {
        wait_for_events();
        manager_.alive(Clock::now());
        receive_messages();
        if (stopping_.load()) {
            if (!std::exchange(stop_handled_, true)) manager_.stopping();
            refuse_queued();
        }
        collect_outgoing();
        flush_backlogs();
        if (forced_exit_at_ && Clock::now() >= *forced_exit_at_) exit_at_once(kExitFailed);
    }
    last_flush();
    listener_.reset();  // first, while nobody else can have taken the path
    socket_.reset();
    guard_.reset();
    context_.reset();
}

void ServerImpl::wait_for_events() {
    std::array<zmq_pollitem_t, 6> items{};
    items[0] = {socket_->get(), 0, ZMQ_POLLIN, 0};
    items[1] = {nullptr, wake_event_.get(), ZMQ_POLLIN, 0};
    int n = 2;
    int lifeline = -1;
    int signals = -1;
    if (options_.lifeline_fd >= 0 && !lifeline_ended_) {
        lifeline = n;
        items[n++] = {nullptr, options_.lifeline_fd, ZMQ_POLLIN | ZMQ_POLLERR, 0};
    }
    if (stop_signal_fd() >= 0 && !stopping_.load()) {
        signals = n;
        items[n++] = {nullptr, stop_signal_fd(), ZMQ_POLLIN, 0};
    }
    if (guard_) {
        for (void* socket : guard_->sockets()) items[n++] = {socket, 0, ZMQ_POLLIN, 0};
    }
    ::zmq_poll(items.data(), n, slow_clients_.empty() ? kIdleMs : kRetryMs);
    if ((items[1].revents & ZMQ_POLLIN) != 0) {
        std::uint64_t count = 0;
        [[maybe_unused]] ssize_t bytes = ::read(wake_event_.get(), &count, sizeof(count));
    }
    if (lifeline >= 0 && items[lifeline].revents != 0) read_lifeline();
    // The handler has armed an alarm, so nothing needs to be forced here.
    if (signals >= 0 && items[signals].revents != 0) request_stop();
}

void ServerImpl::read_lifeline() {
    std::array<char, 64> ignored{};
    ssize_t n = ::read(options_.lifeline_fd, ignored.data(), ignored.size());
    if (n > 0 || (n < 0 && (errno == EINTR || errno == EAGAIN))) return;
    lifeline_ended_ = true;
    forced_exit_at_ = Clock::now() + std::chrono::seconds(kForcedExitSeconds);
    request_stop();
}

void ServerImpl::receive_messages() {
    if (guard_) guard_->attend();
    for (int i = 0; i < kMessagesPerRound; ++i) {
        std::optional<std::vector<msg::Bytes>> frames =
            guard_ ? receive_accepted() : socket_->receive();
        if (!frames) return;
        handle_message(std::move(*frames));
    }
}

/// The next message of a client that has shown its key; what others send is not even looked at.
std::optional<std::vector<msg::Bytes>> ServerImpl::receive_accepted() {
    while (true) {
        std::string user_id;
        std::optional<std::vector<msg::Bytes>> frames = socket_->receive(user_id);
        if (!frames || guard_->is_accepted(user_id)) return frames;
        guard_->intruded();
    }
}

void ServerImpl::handle_message(std::vector<msg::Bytes> frames) {
    const std::shared_ptr<ServerClient> client = client_of(frames[0]);
    std::uint64_t call_id = 0;
    Result<msg::Envelope> envelope = Error{ErrorCode::invalid_argument, "", ""};
    if (frames.size() < 2)
        envelope = Error{ErrorCode::invalid_argument, "a message without frames", ""};
    else
        envelope = msg::decode(frames[1], call_id);
    if (envelope.has_value() && frames.size() - 1 > kMaxFrames)
        envelope = Error{ErrorCode::invalid_argument,
                         "the message has " + std::to_string(frames.size() - 1) +
                             " frames, the limit is " + std::to_string(kMaxFrames),
                         ""};
    if (!envelope.has_value()) {
        std::lock_guard lock(mutex_);
        ++counts_.malformed;
        // Even call id 0 is answered: who sends what cannot be read should be able to see why.
        if (client->waiting_messages < kMessagesPerRound)
            enqueue(outgoing(client, call_id,
                             msg::Failure{std::move(envelope).error(), announcement_.name}, {}));
        return;
    }
    frames.erase(frames.begin(), frames.begin() + 2);
    handle_request(client, std::move(envelope).value(), std::move(frames));
}

void ServerImpl::handle_request(const std::shared_ptr<ServerClient>& client, msg::Envelope envelope,
                                std::vector<msg::Bytes> frames) {
    const std::uint64_t call_id = envelope.call_id;
    const msg::Body& body = envelope.body;
    Responder to = responder(client, call_id);
    if (std::holds_alternative<msg::Ping>(body)) {
        to.send(answer_ping());
    } else if (const auto* hello = std::get_if<msg::Hello>(&body)) {
        to.send(answer_hello(*hello, client));
    } else if (std::holds_alternative<msg::GetStatistics>(body)) {
        to.send(answer_statistics());
    } else if (std::holds_alternative<msg::Shutdown>(body)) {
        to.send(msg::Done{});
        request_stop();
    } else if (std::holds_alternative<msg::Failure>(body) ||
               std::holds_alternative<msg::Announcement>(body) ||
               std::holds_alternative<msg::Pong>(body) ||
               std::holds_alternative<msg::Statistics>(body) ||
               std::holds_alternative<msg::Done>(body)) {
        refuse(client, call_id, not_a_request(msg::name_of(body)));
    } else {
        take_request({std::move(envelope), std::move(frames), std::move(to)});
    }
}

void ServerImpl::take_request(Request request) {
    std::optional<Error> refusal;
    {
        std::lock_guard lock(mutex_);
        refusal = refusal_now();
        if (!refusal) {
            ++counts_.requests;
            const bool was_empty = requests_.empty();
            requests_.push_back(std::move(request));
            if (was_empty) wake_service();
            return;
        }
    }
    refuse(request.responder.client_, request.envelope.call_id, std::move(*refusal));
}

std::optional<Error> ServerImpl::refusal_now() const {
    const std::string& name = announcement_.name;
    if (failure_) return failure_;
    if (stopping_.load())
        return Error{ErrorCode::unavailable, name + " is stopping", "start it again"};
    if (announcement_.state == msg::State::loading)
        return Error{ErrorCode::unavailable,
                     name + " is still loading (" + std::to_string(progress_permille_ / 10) + " %" +
                         (progress_detail_.empty() ? "" : ": " + progress_detail_) + ")",
                     "ask again when it is ready"};
    if (requests_.size() >= options_.max_queue)
        return Error{ErrorCode::resource_exhausted,
                     name + " has " + std::to_string(requests_.size()) +
                         " requests waiting, its limit is " + std::to_string(options_.max_queue),
                     "ask again later, or send fewer requests at a time"};
    return std::nullopt;
}

void ServerImpl::refuse(const std::shared_ptr<ServerClient>& client, std::uint64_t call_id,
                        Error error) {
    std::lock_guard lock(mutex_);
    ++counts_.refused;
    if (call_id == 0 || client->gone) return;
    // A client that floods and does not read loses only refusals.
    if (client->waiting_messages < options_.max_queue + kMessagesPerRound)
        enqueue(outgoing(client, call_id, msg::Failure{std::move(error), announcement_.name}, {}));
}

msg::Body ServerImpl::answer_hello(const msg::Hello& hello,
                                   const std::shared_ptr<ServerClient>& client) {
    ArenaReader reader;  // for this answer only: kept segments would keep the memory of dead peers
    std::vector<bool> probes;
    probes.reserve(hello.probes.size());
    for (const msg::SegmentProbe& probe : hello.probes) probes.push_back(reader.can_read(probe));
    msg::Announcement answer;
    {
        std::lock_guard lock(mutex_);
        if (failure_) return msg::Failure{*failure_, announcement_.name};
        answer = announcement_;
    }
    if (stopping_.load()) answer.state = msg::State::stopping;
    answer.probes = std::move(probes);
    // Fast lanes are for callers on this box: whoever has a segment that this process reads.
    const bool is_near = !answer.probes.empty() && answer.probes[0];
    if (options_.lanes && hello.lane_key != 0 && is_near && answer.state == msg::State::ready)
        answer.lane = options_.lanes->assign(hello.lane_key, hello.probes[0], client);
    return answer;
}

msg::Body ServerImpl::answer_ping() {
    std::lock_guard lock(mutex_);
    const msg::State state = failure_           ? msg::State::failed
                             : stopping_.load() ? msg::State::stopping
                                                : announcement_.state;
    return msg::Pong{instance_,
                     state,
                     progress_permille_,
                     progress_detail_,
                     work_.n_done.load(std::memory_order_relaxed),
                     work_.waits_for_reads.load(std::memory_order_relaxed),
                     waiting_for_};
}

msg::Body ServerImpl::answer_statistics() {
    msg::Statistics out;
    {
        std::lock_guard lock(statistics_mutex_);
        if (statistics_ && !stopping_.load()) out.counters = statistics_();
    }
    out.uptime_ms = static_cast<std::uint64_t>(
        std::chrono::duration_cast<std::chrono::milliseconds>(Clock::now() - started_).count());
    out.resident_bytes = resident_bytes();
    std::lock_guard lock(mutex_);
    out.queued = static_cast<std::uint32_t>(requests_.size());
    out.counters.push_back({"transport_requests", counts_.requests});
    out.counters.push_back({"transport_refused_requests", counts_.refused});
    out.counters.push_back({"transport_malformed_messages", counts_.malformed});
    out.counters.push_back({"transport_replies", counts_.replies});
    out.counters.push_back({"transport_dropped_replies", counts_.replies_dropped});
    if (guard_) out.counters.push_back({"transport_refused_clients", guard_->n_refused()});
    out.counters.push_back({"transport_lane_requests", counts_.lane_requests});
    return out;
}

Responder ServerImpl::responder(std::shared_ptr<ServerClient> client, std::uint64_t call_id) {
    Responder out;
    out.server_ = weak_from_this();
    out.client_ = std::move(client);
    out.call_id_ = call_id;
    return out;
}

std::shared_ptr<ServerClient> ServerImpl::client_of(const msg::Bytes& routing_id) {
    std::string id(reinterpret_cast<const char*>(routing_id.data()), routing_id.size());
    std::weak_ptr<ServerClient>& known = clients_[id];
    if (std::shared_ptr<ServerClient> client = known.lock()) return client;
    auto client = std::make_shared<ServerClient>();
    client->routing_id = std::move(id);
    known = client;
    if (clients_.size() > clients_swept_at_) {
        std::erase_if(clients_, [](const auto& entry) { return entry.second.expired(); });
        clients_swept_at_ = std::max<std::size_t>(64, 2 * clients_.size());
    }
    return client;
}

void ServerImpl::collect_outgoing() {
    std::deque<Outgoing> taken;
    {
        std::lock_guard lock(mutex_);
        taken.swap(outgoing_);
    }
    for (Outgoing& out : taken) {
        std::shared_ptr<ServerClient> client = std::move(out.client);
        out.client.reset();  // the backlog must not own its owner
        if (client->backlog.empty()) slow_clients_.push_back(client);
        client->backlog.push_back(std::move(out));
    }
}

void ServerImpl::flush_backlogs() {
    std::erase_if(slow_clients_, [this](const auto& client) { return flush(*client); });
}

/// Sends what the socket takes; true when nothing is left to send.
bool ServerImpl::flush(ServerClient& client) {
    std::size_t n_sent = 0;
    std::size_t n_bytes = 0;
    SendOutcome outcome = SendOutcome::sent;
    while (!client.backlog.empty()) {
        Outgoing& out = client.backlog.front();
        outcome = socket_->send(client.routing_id, out.envelope, out.frames);
        if (outcome != SendOutcome::sent) break;
        ++n_sent;
        n_bytes += out.bytes;
        client.backlog.pop_front();
    }
    std::lock_guard lock(mutex_);
    client.waiting_messages -= n_sent;
    client.waiting_bytes -= n_bytes;
    counts_.replies += n_sent;
    if (outcome == SendOutcome::unreachable) {
        counts_.replies_dropped += client.backlog.size();
        client.backlog.clear();
        client.gone = true;
    }
    return client.backlog.empty();
}

void ServerImpl::refuse_queued() {
    std::deque<Request> left;
    {
        std::lock_guard lock(mutex_);
        left.swap(requests_);
    }
    for (const Request& request : left) {
        std::optional<Error> refusal;
        {
            std::lock_guard lock(mutex_);
            refusal = refusal_now();
        }
        if (refusal)
            refuse(request.responder.client_, request.envelope.call_id, std::move(*refusal));
    }
}

/// Gives the last replies (Done, the refusals of a stop) a bounded time to leave.
void ServerImpl::last_flush() {
    Deadline deadline = Deadline::after_ms(kLastFlushMs);
    refuse_queued();
    do {
        collect_outgoing();
        flush_backlogs();
        if (slow_clients_.empty()) return;
        ::zmq_poll(nullptr, 0, kRetryMs);
        zmq_pollitem_t item{socket_->get(), 0, ZMQ_POLLIN, 0};
        ::zmq_poll(&item, 1, 0);  // lets the socket hear of room and of clients that left
    } while (!deadline.expired());
}

}  // namespace k3::transport
