// The fast lanes of a Server: requests that reach the service's thread without the connection
// thread in between. What they ask is decoded, checked and refused as what comes from the socket.

#include <poll.h>
#include <unistd.h>

#include <algorithm>
#include <utility>

#include "common/transport/server_impl.h"

namespace k3::transport {

std::optional<Request> ServerImpl::pop_lane() {
    while (!stopping_.load()) {
        std::optional<LaneHost::Call> call = options_.lanes->next();
        if (!call) return std::nullopt;
        if (std::optional<Request> request = read_lane(std::move(*call))) return request;
    }
    return std::nullopt;
}

/// Nothing if it was refused.
std::optional<Request> ServerImpl::read_lane(LaneHost::Call call) {
    std::uint64_t call_id = 0;
    Result<msg::Envelope> envelope =
        call.status.has_value() ? msg::decode(call.message.envelope, call_id) : call.status.error();
    Responder to = responder(std::move(call.client), call_id);
    to.lane_ = call.tag;
    std::optional<Error> refusal;
    {
        std::lock_guard lock(mutex_);
        ++(envelope.has_value() ? counts_.lane_requests : counts_.malformed);
        refusal = refusal_now();
    }
    if (!envelope.has_value())
        refusal = envelope.error();
    else if (!std::holds_alternative<msg::ExpertCall>(envelope->body))
        refusal = Error{ErrorCode::unsupported,
                        std::string(msg::name_of(envelope->body)) + " came through a fast lane",
                        "send it through the socket"};
    if (!refusal)
        return Request{std::move(envelope).value(), std::move(call.message.frames), std::move(to)};
    const msg::Body body = msg::Failure{std::move(*refusal), options_.announcement.name};
    answer_lane(to, msg::encode({options_.run_id, call_id, body}), {});
    return std::nullopt;
}

/// False if the reply must take the socket, or the request came from there.
bool ServerImpl::answer_lane(const Responder& to, const msg::Bytes& envelope,
                             const std::vector<msg::Bytes>& frames) {
    if (to.lane_.number == 0 || finish_.load() ||
        !options_.lanes->answer(to.lane_, envelope, frames))
        return false;
    std::lock_guard lock(mutex_);
    ++counts_.replies;
    return true;
}

void ServerImpl::wake_service() noexcept {
    const std::uint64_t one = 1;
    [[maybe_unused]] ssize_t n = ::write(requests_event_.get(), &one, sizeof(one));
    if (options_.lanes) options_.lanes->ring();
}

void ServerImpl::wait_for_request(Deadline deadline) {
    if (options_.lanes) return options_.lanes->wait(deadline);
    pollfd wait{requests_event_.get(), POLLIN, 0};
    ::poll(&wait, 1, static_cast<int>(std::min<std::int64_t>(deadline.remaining_ms(), 60000)));
}

}  // namespace k3::transport
