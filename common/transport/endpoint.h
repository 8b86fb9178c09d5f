#pragma once
// Addresses of services: "ipc:///run/k3/trunk.sock" on this box, "tcp://10.0.0.2:5601" elsewhere.

#include <cstddef>
#include <string>
#include <string_view>

#include "common/base/result.h"

namespace k3::transport {

/// Longest path of a unix socket: 108 bytes in the kernel's structure, with the closing zero.
inline constexpr std::size_t kMaxSocketPath = 107;

struct Endpoint {
    enum class Kind { ipc, tcp };
    Kind kind = Kind::ipc;
    std::string text;  // as given, for sentences and for ZeroMQ
    std::string path;  // ipc: the socket file
    std::string host;  // tcp: address or interface name; without brackets
    std::string port;  // tcp: digits, or "*" for any free one

    /// True if only processes of this box can reach it.
    bool is_local() const;
};

/// Errors: invalid_argument, naming the text and the legal forms; for ipc also a path over 107
/// bytes, with both numbers.
Result<Endpoint> parse_endpoint(std::string_view text);

}  // namespace k3::transport
