#pragma once
// How a peer wants to be spoken to, asked with the first bytes of ZeroMQ's wire protocol.
//
// A server with keys hangs up on whoever has the wrong ones, and so does a proxy in front of a
// server that is down. The security mechanism in the peer's greeting (ZMTP 3.0) tells the two
// apart.

#include "common/base/deadline.h"
#include "common/transport/endpoint.h"

namespace k3::transport {

enum class Greeting {
    none,   // nobody there, or nothing that speaks ZMTP 3
    plain,  // no keys wanted
    curve,  // keys wanted
};

/// Connects to a tcp endpoint, reads its greeting and hangs up.
Greeting read_greeting(const Endpoint& endpoint, Deadline deadline);

}  // namespace k3::transport
