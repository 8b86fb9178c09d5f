#pragma once
// What carries the messages of a Channel: a ZeroMQ socket (zmq_link.h), always, and beside it a
// fast lane of shared memory (lane_link.h) where both processes share a box. Both carry the same
// envelopes, and what arrives by either is decoded and checked by the same code.
//
// One thread uses a link.

#include <span>
#include <string>
#include <vector>

#include "common/base/deadline.h"
#include "common/transport/messages/types.h"
#include "common/transport/zmq_socket.h"

namespace k3::transport {

struct Incoming {
    std::span<const std::byte> envelope;  // valid until the next message is received
    std::vector<msg::Bytes> frames;       // after the envelope
};

class Link {
  public:
    virtual ~Link() = default;

    /// Without waiting; consumed only by `sent`.
    virtual SendOutcome send(msg::Bytes& envelope, std::vector<msg::Bytes>& frames) = 0;
    /// The next message, if one has arrived.
    virtual bool receive(Incoming& message) = 0;
    /// Until something has arrived (`for_room`: or can be sent), the link has ended, or `deadline`;
    /// perhaps less.
    virtual void wait(Deadline deadline, bool for_room) = 0;
    /// Why nothing can come any more, "has closed the connection"; empty while it can. What came
    /// before is received first.
    virtual const std::string& ended() const noexcept = 0;
};

}  // namespace k3::transport
