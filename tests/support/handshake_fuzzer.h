#pragma once
// Throws bad handshakes at a tcp endpoint, as somebody does who has no keys.
//
// Each connection says one of these: nothing but random bytes; a greeting cut short or with flipped
// bits; a whole greeting and then commands and frames that are damaged, too large, too early, or
// complete requests of this protocol in the clear.

#include <cstdint>
#include <string>

namespace k3::test {

struct HandshakeFuzzReport {
    int n_messages = 0;     // said
    int n_connections = 0;  // that were accepted
    /// Bytes behind the peer's greeting that were neither WELCOME nor ERROR: served, in short.
    int n_served = 0;
};

/// At least `n_messages`, up to five in each connection.
HandshakeFuzzReport fuzz_handshakes(const std::string& endpoint, int n_messages,
                                    std::uint64_t seed = 20261130);

}  // namespace k3::test
