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
        std::uint64_t serial = 0;  // no other link of the context has had it
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
    /// Looks whether the connection has ended. What came before that is then still received.
    void look();
    /// It has met somebody.
    bool is_connected() const noexcept { return is_connected_; }
    /// Nobody is there to hear the last words.
    void give_up() noexcept { is_given_up_ = true; }

  private:
    std::unique_ptr<ZmqSocket> socket_;
    std::unique_ptr<ZmqSocket> monitor_;
    msg::Bytes envelope_;  // of the message received last
    bool is_connected_ = false;
    bool is_given_up_ = false;
    std::string ended_;
};

}  // namespace k3::transport
