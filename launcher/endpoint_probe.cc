#include "launcher/endpoint_probe.h"

#include <fmt/format.h>
#include <netdb.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/un.h>

#include <cerrno>
#include <condition_variable>
#include <cstring>
#include <memory>
#include <mutex>
#include <optional>
#include <thread>
#include <vector>

#include "common/base/deadline.h"
#include "common/base/fd.h"
#include "common/transport/endpoint.h"

namespace k3::launcher {

namespace {

using Finding = EndpointProbe::Finding;

std::string reason_of(int code, sa_family_t family) {
    if (family == AF_UNIX && code == ENOENT) return "there is no such socket file";
    if (family == AF_UNIX && code == ECONNREFUSED) return "nobody listens on that socket file";
    if (code == ECONNREFUSED) return "the connection is refused";
    return std::strerror(code);
}

EndpointProbe connect_to(const sockaddr* address, socklen_t size, Deadline deadline) {
    Fd fd(::socket(address->sa_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
    if (!fd.valid()) return {Finding::silent, std::strerror(errno)};
    if (::connect(fd.get(), address, size) == 0) return {Finding::listening, ""};
    int problem = errno;
    // A unix socket says so when the queue of a listener is full.
    if (problem == EAGAIN) return {Finding::listening, ""};
    if (problem == EINPROGRESS) {
        pollfd wait{fd.get(), POLLOUT, 0};
        if (::poll(&wait, 1, static_cast<int>(deadline.remaining_ms())) != 1)
            return {Finding::silent, "the host does not react"};
        socklen_t length = sizeof problem;
        ::getsockopt(fd.get(), SOL_SOCKET, SO_ERROR, &problem, &length);
        if (problem == 0) return {Finding::listening, ""};
    }
    return {problem == ETIMEDOUT ? Finding::silent : Finding::absent,
            reason_of(problem, address->sa_family)};
}

EndpointProbe connect_ipc(const std::string& path, Deadline deadline) {
    sockaddr_un address = {};
    address.sun_family = AF_UNIX;
    std::memcpy(address.sun_path, path.c_str(), path.size() + 1);  // bounded by parse_endpoint
    return connect_to(reinterpret_cast<const sockaddr*>(&address), sizeof address, deadline);
}

struct Address {
    sockaddr_storage bytes = {};
    socklen_t size = 0;
};

/// What the resolver said, shared with a thread that may outlive the question.
struct Lookup {
    std::mutex mutex;
    std::condition_variable done;
    bool finished = false;
    int code = 0;
    std::vector<Address> addresses;
};

void look_up(const transport::Endpoint& endpoint, int flags, Lookup& lookup) {
    addrinfo hints = {};
    hints.ai_flags = flags;
    // As the channels do: version 6 only if it is written so.
    hints.ai_family = endpoint.text.find('[') == std::string::npos ? AF_INET : AF_INET6;
    hints.ai_socktype = SOCK_STREAM;
    addrinfo* found = nullptr;
    int code = ::getaddrinfo(endpoint.host.c_str(), endpoint.port.c_str(), &hints, &found);
    std::lock_guard lock(lookup.mutex);
    lookup.code = code;
    for (const addrinfo* it = code == 0 ? found : nullptr; it != nullptr; it = it->ai_next) {
        Address address;
        address.size = it->ai_addrlen;
        std::memcpy(&address.bytes, it->ai_addr, it->ai_addrlen);
        lookup.addresses.push_back(address);
    }
    if (code == 0) ::freeaddrinfo(found);
    lookup.finished = true;
    lookup.done.notify_all();
}

EndpointProbe connect_tcp(const transport::Endpoint& endpoint, Deadline deadline) {
    auto lookup = std::make_shared<Lookup>();  // owners: this call and the thread
    look_up(endpoint, AI_NUMERICHOST, *lookup);
    if (lookup->code == EAI_NONAME) {
        lookup = std::make_shared<Lookup>();
        std::thread([endpoint, lookup] { look_up(endpoint, 0, *lookup); }).detach();
    }
    std::unique_lock lock(lookup->mutex);
    if (!lookup->done.wait_until(lock, deadline.at(), [&] { return lookup->finished; }))
        return {Finding::silent, fmt::format("{} is not resolved", endpoint.host)};
    if (lookup->code != 0)
        return {Finding::absent, fmt::format("{} cannot be resolved ({})", endpoint.host,
                                             ::gai_strerror(lookup->code))};
    EndpointProbe probe{Finding::absent, "the name has no address"};
    for (const Address& address : lookup->addresses) {
        probe =
            connect_to(reinterpret_cast<const sockaddr*>(&address.bytes), address.size, deadline);
        if (probe.finding == Finding::listening) break;
    }
    return probe;
}

}  // namespace

EndpointProbe probe_endpoint(const std::string& endpoint, std::int64_t wait_ms) {
    auto parsed = transport::parse_endpoint(endpoint);
    if (!parsed.has_value()) return {Finding::absent, parsed.error().message};
    Deadline deadline = Deadline::after_ms(wait_ms);
    EndpointProbe probe = parsed->kind == transport::Endpoint::Kind::ipc
                              ? connect_ipc(parsed->path, deadline)
                              : connect_tcp(*parsed, deadline);
    if (probe.finding == Finding::silent) probe.reason += fmt::format(" within {} ms", wait_ms);
    return probe;
}

}  // namespace k3::launcher
