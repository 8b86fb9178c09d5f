#include "common/transport/zmq_socket.h"

#include <zmq.h>

#include <array>
#include <cerrno>
#include <cstring>
#include <memory>
#include <utility>

#include "common/base/check.h"

namespace k3::transport {

namespace {

// Below this a copy is cheaper than handing over the buffer.
constexpr std::size_t kHandOverBytes = 8192;

void free_bytes(void*, void* owner) { delete static_cast<msg::Bytes*>(owner); }

}  // namespace

ZmqContext::ZmqContext() : context_(::zmq_ctx_new()) {
    K3_CHECK(context_ != nullptr, std::strerror(errno));
}

ZmqContext::~ZmqContext() {
    while (::zmq_ctx_term(context_) != 0 && errno == EINTR) {
    }
}

ZmqSocket::ZmqSocket(const ZmqContext& context, int type)
    : socket_(::zmq_socket(context.get(), type)) {
    K3_CHECK(socket_ != nullptr, std::strerror(errno));
    set(ZMQ_LINGER, kLingerMs);
    set(ZMQ_SNDHWM, kHighWaterMark);
    set(ZMQ_RCVHWM, kHighWaterMark);
}

ZmqSocket::~ZmqSocket() { ::zmq_close(socket_); }

void ZmqSocket::set(int option, int value) noexcept {
    ::zmq_setsockopt(socket_, option, &value, sizeof(value));
}

void ZmqSocket::set_max_message_bytes(std::size_t bytes) noexcept {
    auto value = static_cast<std::int64_t>(bytes);
    ::zmq_setsockopt(socket_, ZMQ_MAXMSGSIZE, &value, sizeof(value));
}

int ZmqSocket::bind(const std::string& endpoint) noexcept {
    return ::zmq_bind(socket_, endpoint.c_str()) == 0 ? 0 : ::zmq_errno();
}

int ZmqSocket::connect(const std::string& endpoint) noexcept {
    return ::zmq_connect(socket_, endpoint.c_str()) == 0 ? 0 : ::zmq_errno();
}

std::string ZmqSocket::last_endpoint() const {
    std::array<char, 512> text{};
    std::size_t size = text.size();
    if (::zmq_getsockopt(socket_, ZMQ_LAST_ENDPOINT, text.data(), &size) != 0) return {};
    return text.data();
}

std::optional<std::vector<msg::Bytes>> ZmqSocket::receive() { return receive(nullptr); }

std::optional<std::vector<msg::Bytes>> ZmqSocket::receive(std::string& user_id) {
    return receive(&user_id);
}

std::optional<std::vector<msg::Bytes>> ZmqSocket::receive(std::string* user_id) {
    std::vector<msg::Bytes> frames;
    while (true) {
        zmq_msg_t frame;
        ::zmq_msg_init(&frame);
        // The frames of one message arrive together, so only the first can be missing.
        int n = 0;
        do n = ::zmq_msg_recv(&frame, socket_, ZMQ_DONTWAIT);
        while (n < 0 && ::zmq_errno() == EINTR);
        if (n < 0) {
            ::zmq_msg_close(&frame);
            return std::nullopt;
        }
        const auto* data = static_cast<const std::byte*>(::zmq_msg_data(&frame));
        if (user_id != nullptr && !frames.empty()) {  // the first is the ROUTER's, not the peer's
            const char* id = ::zmq_msg_gets(&frame, "User-Id");
            if (frames.size() == 1)
                *user_id = id == nullptr ? "" : id;
            else if (id == nullptr || *user_id != id)
                user_id->clear();
        }
        frames.emplace_back(data, data + ::zmq_msg_size(&frame));
        const bool more = ::zmq_msg_more(&frame) != 0;
        ::zmq_msg_close(&frame);
        if (!more) return frames;
    }
}

int ZmqSocket::send_frame(msg::Bytes& bytes, int flags) {
    zmq_msg_t frame;
    msg::Bytes* owner = nullptr;
    if (bytes.size() < kHandOverBytes) {
        ::zmq_msg_init_size(&frame, bytes.size());
        if (!bytes.empty()) std::memcpy(::zmq_msg_data(&frame), bytes.data(), bytes.size());
    } else {
        owner = new msg::Bytes(std::move(bytes));
        ::zmq_msg_init_data(&frame, owner->data(), owner->size(), free_bytes, owner);
    }
    int n = 0;
    do n = ::zmq_msg_send(&frame, socket_, flags | ZMQ_DONTWAIT);
    while (n < 0 && ::zmq_errno() == EINTR);
    if (n >= 0) return 0;
    const int problem = ::zmq_errno();
    if (owner != nullptr) bytes = std::move(*owner);  // the frame still points at its heap block
    ::zmq_msg_close(&frame);
    return problem;
}

SendOutcome ZmqSocket::send(const std::string& routing_id, msg::Bytes& envelope,
                            std::vector<msg::Bytes>& frames) {
    const int more = frames.empty() ? 0 : ZMQ_SNDMORE;
    int problem = 0;
    if (routing_id.empty()) {
        problem = send_frame(envelope, more);
    } else {
        const auto* id = reinterpret_cast<const std::byte*>(routing_id.data());
        msg::Bytes first(id, id + routing_id.size());
        problem = send_frame(first, ZMQ_SNDMORE);
        if (problem == 0) send_frame(envelope, more);
    }
    if (problem != 0)
        return problem == EHOSTUNREACH ? SendOutcome::unreachable : SendOutcome::would_block;
    // Once the first frame is taken, the rest must follow even if the peer dies now: ZeroMQ would
    // take the next message for the missing part of this one.
    for (std::size_t i = 0; i < frames.size(); ++i)
        send_frame(frames[i], i + 1 < frames.size() ? ZMQ_SNDMORE : 0);
    return SendOutcome::sent;
}

}  // namespace k3::transport
