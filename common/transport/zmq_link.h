#pragma once
// One connection of a caller to a service through ZeroMQ.
//
// A link serves one connection and ends with it: ZeroMQ's own reconnecting would hand what is still
// unsent to the peer's successor, and with ZMQ_IMMEDIATE it would throw away replies that have
// arrived.

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "common/transport/curve_keys.h"
#include "common/transport/link.h"
#include "common/transport/zmq_socket.h"

namespace k3::transport {

class ZmqLink final : public Link {
  public:
    /// Why a link ends to which nobody ever listened.
    static constexpr const char* kNobody = "does not answer: nobody listens there";

    struct Options {
        std::string endpoint;
        std::size_t max_message_bytes = 0;
        std::uint64_t serial = 0;         // no other link of the context has had it
        const CurveKeys* keys = nullptr;  // null: none are shown; borrowed for the call
    };
    ZmqLink(const ZmqContext& context, const Options& options);
    ~ZmqLink() override;
    ZmqLink(const ZmqLink&) = delete;
    ZmqLink& operator=(const ZmqLink&) = delete;

    SendOutcome send(msg::Bytes& envelope, std::vector<msg::Bytes>& frames) override;
    bool receive(Incoming& message) override;
    void wait(Deadline deadline, bool for_room) override;
    const std::string& ended() const noexcept override { return ended_; }

    /// The sockets to zmq_poll() for input, for whoever has several links: one has a message, or
    /// the other something for look() to see.
    std::array<void*, 2> sockets() const noexcept;
    /// What has become of the handshake, in which both sides show their keys.
    enum class Handshake {
        open,      // it goes on, or nobody was there to begin one
        done,      // messages may pass, or have passed
        cut,       // the peer has hung up before its end: why is not known
        no_keys,   // the peer has keys and this side has none, or the other way round
        bad_keys,  // the peer does not accept the keys of this side
    };
    Handshake handshake() const noexcept { return handshake_; }

    /// Looks whether the connection has ended. What came before that is then still received.
    void look();
    /// It has met somebody.
    bool is_connected() const noexcept { return is_connected_; }
    /// Nobody is there to hear the last words.
    void give_up() noexcept { is_given_up_ = true; }

  private:
    void end(std::uint16_t event, std::uint32_t value);

    std::unique_ptr<ZmqSocket> socket_;
    std::unique_ptr<ZmqSocket> monitor_;
    msg::Bytes envelope_;  // of the message received last
    Handshake handshake_ = Handshake::open;
    bool is_connected_ = false;
    bool is_given_up_ = false;
    std::string ended_;
};

}  // namespace k3::transport
