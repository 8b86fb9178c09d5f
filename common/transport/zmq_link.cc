#include "common/transport/zmq_link.h"

#include <zmq.h>

#include <cstdint>
#include <cstring>
#include <optional>
#include <utility>

#include "common/transport/curve_guard.h"

namespace k3::transport {

namespace {

constexpr int kNeverMs = 1000 * 60 * 60 * 24;
constexpr int kConnectTimeoutMs = 2000;

}  // namespace

ZmqLink::ZmqLink(const ZmqContext& context, const Options& options)
    : socket_(std::make_unique<ZmqSocket>(context, ZMQ_DEALER)),
      monitor_(std::make_unique<ZmqSocket>(context, ZMQ_PAIR)) {
    socket_->set(ZMQ_RECONNECT_IVL, kNeverMs);
    socket_->set(ZMQ_CONNECT_TIMEOUT, kConnectTimeoutMs);
    if (options.endpoint.find('[') != std::string::npos) socket_->set(ZMQ_IPV6, 1);
    socket_->set_max_message_bytes(options.max_message_bytes);
    if (options.keys != nullptr) call_with_keys(*socket_, *options.keys);
    const std::string name = "inproc://monitor-" + std::to_string(options.serial);
    ::zmq_socket_monitor(socket_->get(), name.c_str(),
                         ZMQ_EVENT_CONNECTED | ZMQ_EVENT_DISCONNECTED | ZMQ_EVENT_CONNECT_RETRIED |
                             ZMQ_EVENT_HANDSHAKE_SUCCEEDED | ZMQ_EVENT_HANDSHAKE_FAILED_NO_DETAIL |
                             ZMQ_EVENT_HANDSHAKE_FAILED_PROTOCOL | ZMQ_EVENT_HANDSHAKE_FAILED_AUTH);
    monitor_->connect(name);
    socket_->connect(options.endpoint);
}

ZmqLink::~ZmqLink() {
    // Last words are for a peer that is there.
    if (is_given_up_ || !ended_.empty() || !is_connected_) socket_->set(ZMQ_LINGER, 0);
    ::zmq_socket_monitor(socket_->get(), nullptr, 0);
    monitor_.reset();
    socket_.reset();
}

SendOutcome ZmqLink::send(msg::Bytes& envelope, std::vector<msg::Bytes>& frames) {
    return socket_->send({}, envelope, frames);
}

bool ZmqLink::receive(Incoming& message) {
    std::optional<std::vector<msg::Bytes>> frames = socket_->receive();
    if (!frames) return false;
    envelope_ = std::move(frames->front());
    frames->erase(frames->begin());
    message.envelope = envelope_;
    message.frames = std::move(*frames);
    return true;
}

void ZmqLink::wait(Deadline deadline, bool for_room) {
    const auto events = static_cast<short>(for_room ? ZMQ_POLLOUT : ZMQ_POLLIN);
    zmq_pollitem_t items[2] = {{socket_->get(), 0, events, 0}, {monitor_->get(), 0, ZMQ_POLLIN, 0}};
    ::zmq_poll(items, ended_.empty() ? 2 : 0, deadline.remaining_ms());
}

std::array<void*, 2> ZmqLink::sockets() const noexcept { return {socket_->get(), monitor_->get()}; }

void ZmqLink::look() {
    while (std::optional<std::vector<msg::Bytes>> frames = monitor_->receive()) {
        std::uint16_t event = 0;
        std::uint32_t value = 0;
        std::memcpy(&event, (*frames)[0].data(), sizeof(event));
        std::memcpy(&value, (*frames)[0].data() + sizeof(event), sizeof(value));
        if (event == ZMQ_EVENT_CONNECTED)
            is_connected_ = true;
        else if (event == ZMQ_EVENT_HANDSHAKE_SUCCEEDED)
            handshake_ = Handshake::done;
        else if (ended_.empty())  // the first one is the cause: the end of a connection is followed
            end(event, value);    // by a plan to connect again
    }
}

void ZmqLink::end(std::uint16_t event, std::uint32_t value) {
    if (event == ZMQ_EVENT_CONNECT_RETRIED) {
        ended_ = kNobody;
        return;
    }
    ended_ = event == ZMQ_EVENT_DISCONNECTED ? "has closed the connection"
                                             : "does not speak this protocol";
    if (handshake_ == Handshake::done) return;
    handshake_ = event == ZMQ_EVENT_HANDSHAKE_FAILED_AUTH ? Handshake::bad_keys
                 : event == ZMQ_EVENT_HANDSHAKE_FAILED_PROTOCOL &&
                         value == ZMQ_PROTOCOL_ERROR_ZMTP_MECHANISM_MISMATCH
                     ? Handshake::no_keys
                     : Handshake::cut;
}

}  // namespace k3::transport
