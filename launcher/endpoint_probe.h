#pragma once
// What a plain connect() finds at an endpoint, before any message is exchanged there.
//
// ZeroMQ connects in the background and hides why nobody answers: a socket file that does not exist
// looks like a service that thinks. Asking the kernel tells the two apart at once.

#include <cstdint>
#include <string>

namespace k3::launcher {

struct EndpointProbe {
    enum class Finding {
        listening,  // a connection is accepted
        absent,     // certainly nobody: no such file, refused, no such host, no route
        silent,     // nothing came back in the time granted (a host that is off, a firewall)
    };
    Finding finding = Finding::silent;
    std::string reason;  // if not listening, for sentences: "there is no such socket file"
};

/// Connects to `ipc:///path` or `tcp://host:port` and hangs up again; takes `wait_ms` at most. Host
/// names are resolved, on a thread that is left behind when the resolver does not answer.
EndpointProbe probe_endpoint(const std::string& endpoint, std::int64_t wait_ms);

}  // namespace k3::launcher
