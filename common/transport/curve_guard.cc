#include "common/transport/curve_guard.h"

#include <netdb.h>
#include <sys/socket.h>
#include <zmq.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <random>
#include <string_view>
#include <utility>

#include "common/base/check.h"

namespace k3::transport {

namespace {

constexpr int kZapEnforceDomain = 93;
constexpr const char* kZapEndpoint = "inproc://zeromq.zap.01";
constexpr const char* kDomain = "k3pipe";
constexpr const char* kMonitorEndpoint = "inproc://handshakes";
// A client that says nothing holds its connection, and buffers, no longer.
constexpr int kHandshakeMs = 10000;
constexpr std::chrono::seconds kTellEvery{5};
constexpr int kPerRound = 64;  // the clients that are in want their turn, too

// Frames of a ZAP question.
enum : std::size_t {
    kVersionFrame,
    kRequestFrame,
    kDomainFrame,
    kAddressFrame,
    kIdentityFrame,
    kMechanismFrame,
    kKeyFrame,
    kQuestionFrames
};

/// Keys exist only where CURVE does (CurveKeys::load), so these cannot fail but by a mistake here.
void set_text(ZmqSocket& socket, int option, const char* text, std::size_t bytes) {
    const int set = ::zmq_setsockopt(socket.get(), option, text, bytes);
    K3_CHECK(set == 0, "option " + std::to_string(option));
}
void set_key(ZmqSocket& socket, int option, const KeyText& key) {
    set_text(socket, option, key.data(), key.size());
}
void set_number(ZmqSocket& socket, int option, int value) {
    const int set = ::zmq_setsockopt(socket.get(), option, &value, sizeof(value));
    K3_CHECK(set == 0, "option " + std::to_string(option));
}

std::string_view text_of(const msg::Bytes& frame) {
    return {reinterpret_cast<const char*>(frame.data()), frame.size()};
}
msg::Bytes frame_of(std::string_view text) {
    const auto* data = reinterpret_cast<const std::byte*>(text.data());
    return {data, data + text.size()};
}

std::string random_user_id() {
    std::random_device device;
    std::string id;
    for (int i = 0; i < 4; ++i) id += std::to_string(device()) + ".";
    return id;
}

bool is_key(const msg::Bytes& bytes, const KeyText& key) {
    std::array<std::uint8_t, 32> wanted{};
    K3_CHECK(::zmq_z85_decode(wanted.data(), key.data()) != nullptr, "a public key");
    return bytes.size() == wanted.size() &&
           std::memcmp(bytes.data(), wanted.data(), wanted.size()) == 0;
}

/// "10.0.0.7:41820" for the other end of a connection, if it is still there.
std::string address_of(int fd) {
    sockaddr_storage address = {};
    socklen_t size = sizeof(address);
    std::array<char, NI_MAXHOST> host{};
    std::array<char, NI_MAXSERV> port{};
    auto* generic = reinterpret_cast<sockaddr*>(&address);
    if (::getpeername(fd, generic, &size) != 0 ||
        ::getnameinfo(generic, size, host.data(), host.size(), port.data(), port.size(),
                      NI_NUMERICHOST | NI_NUMERICSERV) != 0)
        return "an address that has gone";
    return std::string(host.data()) + ":" + port.data();
}

std::string reason_of(std::uint32_t problem) {
    if (problem == ZMQ_PROTOCOL_ERROR_ZMTP_MECHANISM_MISMATCH) return "it has no keys";
    if (problem == ZMQ_PROTOCOL_ERROR_ZMTP_CRYPTOGRAPHIC) return "it has keys of another pipeline";
    return "it does not keep to the protocol";
}

}  // namespace

void serve_with_keys(ZmqSocket& socket, const CurveKeys& keys) {
    set_number(socket, ZMQ_CURVE_SERVER, 1);
    set_key(socket, ZMQ_CURVE_SECRETKEY, keys.server_secret());
    set_text(socket, ZMQ_ZAP_DOMAIN, kDomain, std::strlen(kDomain));
    set_number(socket, kZapEnforceDomain, 1);
    set_number(socket, ZMQ_HANDSHAKE_IVL, kHandshakeMs);
}

void call_with_keys(ZmqSocket& socket, const CurveKeys& keys) {
    set_key(socket, ZMQ_CURVE_SERVERKEY, keys.server_public());
    set_key(socket, ZMQ_CURVE_PUBLICKEY, keys.client_public());
    set_key(socket, ZMQ_CURVE_SECRETKEY, keys.client_secret());
}

CurveGuard::CurveGuard(const ZmqContext& context, ZmqSocket& server,
                       std::shared_ptr<const CurveKeys> keys,
                       std::function<void(const std::string&)> tell)
    : keys_(std::move(keys)),
      tell_(std::move(tell)),
      user_id_(random_user_id()),
      handler_(context, ZMQ_REP),
      monitor_(context, ZMQ_PAIR) {
    K3_CHECK(handler_.bind(kZapEndpoint) == 0, ::zmq_strerror(::zmq_errno()));
    const int watched = ::zmq_socket_monitor(
        server.get(), kMonitorEndpoint,
        ZMQ_EVENT_ACCEPTED | ZMQ_EVENT_DISCONNECTED | ZMQ_EVENT_HANDSHAKE_FAILED_PROTOCOL);
    K3_CHECK(watched == 0, ::zmq_strerror(::zmq_errno()));
    K3_CHECK(monitor_.connect(kMonitorEndpoint) == 0, ::zmq_strerror(::zmq_errno()));
    serve_with_keys(server, *keys_);
}

CurveGuard::~CurveGuard() = default;

void CurveGuard::attend() {
    for (int i = 0; i < kPerRound; ++i) {
        auto event = monitor_.receive();
        if (event) watch(*event);
        auto question = handler_.receive();
        if (question) answer(std::move(*question));
        if (!event && !question) return;
    }
}

void CurveGuard::answer(std::vector<msg::Bytes> question) {
    const bool is_meant =
        question.size() == kQuestionFrames && text_of(question[kVersionFrame]) == "1.0" &&
        text_of(question[kDomainFrame]) == kDomain && text_of(question[kMechanismFrame]) == "CURVE";
    const bool is_welcome = is_meant && is_key(question[kKeyFrame], keys_->client_public());
    if (!is_welcome)
        refused(is_meant ? std::string(text_of(question[kAddressFrame])) : "an unknown address",
                "its key is none of this pipeline");
    msg::Bytes version = frame_of("1.0");
    std::vector<msg::Bytes> rest;
    rest.push_back(question.size() > kRequestFrame ? std::move(question[kRequestFrame])
                                                   : msg::Bytes());
    rest.push_back(frame_of(is_welcome ? "200" : "400"));
    rest.push_back(frame_of(is_welcome ? "OK" : "unknown key"));
    rest.push_back(frame_of(is_welcome ? user_id_ : ""));
    rest.emplace_back();  // no metadata
    handler_.send({}, version, rest);
}

/// Events of one socket come from one thread of ZeroMQ: a failure is followed by the end of the
/// same connection, which tells whose it was.
void CurveGuard::watch(const std::vector<msg::Bytes>& event) {
    std::uint16_t what = 0;
    std::uint32_t value = 0;
    if (event[0].size() < sizeof(what) + sizeof(value)) return;
    std::memcpy(&what, event[0].data(), sizeof(what));
    std::memcpy(&value, event[0].data() + sizeof(what), sizeof(value));
    if (what == ZMQ_EVENT_ACCEPTED) {
        addresses_[value] = address_of(static_cast<int>(value));
    } else if (what == ZMQ_EVENT_HANDSHAKE_FAILED_PROTOCOL) {
        broken_off_ = reason_of(value);
    } else if (what == ZMQ_EVENT_DISCONNECTED) {
        auto found = addresses_.find(value);
        if (!broken_off_.empty())
            refused(found == addresses_.end() ? "an unknown address" : found->second,
                    std::exchange(broken_off_, {}));
        if (found != addresses_.end()) addresses_.erase(found);
    }
}

void CurveGuard::intruded() { refused("an unknown address", "its message bears no accepted key"); }

void CurveGuard::refused(const std::string& address, const std::string& why) {
    ++n_refused_;
    const Clock::time_point now = Clock::now();
    if (told_at_ && now - *told_at_ < kTellEvery) {
        ++n_untold_;
        return;
    }
    told_at_ = now;
    const std::uint64_t n_untold = std::exchange(n_untold_, 0);
    if (!tell_) return;
    tell_("refused a client at " + address + ": " + why +
          (n_untold == 0 ? ""
                         : " (and " + std::to_string(n_untold) + " others since the last line)"));
}

}  // namespace k3::transport
