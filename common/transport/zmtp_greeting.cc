#include "common/transport/zmtp_greeting.h"

#include <netdb.h>
#include <poll.h>
#include <sys/socket.h>

#include <array>
#include <cerrno>
#include <cstdint>
#include <memory>
#include <string_view>

#include "common/base/fd.h"

namespace k3::transport {

namespace {

// A greeting: signature of 10 bytes, version of 2, mechanism of 20 (padded with zeros), the rest.
// The peer says its mechanism as soon as it knows our version; it never hears of ours.
constexpr std::array<std::uint8_t, 11> kOurs = {0xff, 0, 0, 0, 0, 0, 0, 0, 1, 0x7f, 3};
constexpr std::size_t kMechanismOffset = 12;
constexpr std::size_t kMechanismBytes = 20;
constexpr std::size_t kWantedBytes = kMechanismOffset + kMechanismBytes;

bool wait_for(int fd, short events, Deadline deadline) {
    while (true) {
        pollfd item{fd, events, 0};
        const int n = ::poll(&item, 1, static_cast<int>(deadline.remaining_ms()));
        if (n == 1) return true;
        if (n == 0 || errno != EINTR) return false;
    }
}

Fd connect_to(const addrinfo& address, Deadline deadline) {
    Fd fd(::socket(address.ai_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
    if (!fd.valid()) return {};
    if (::connect(fd.get(), address.ai_addr, address.ai_addrlen) == 0) return fd;
    int problem = errno;
    socklen_t size = sizeof(problem);
    if (problem != EINPROGRESS || !wait_for(fd.get(), POLLOUT, deadline) ||
        ::getsockopt(fd.get(), SOL_SOCKET, SO_ERROR, &problem, &size) != 0 || problem != 0)
        return {};
    return fd;
}

Greeting converse(int fd, Deadline deadline) {
    if (::send(fd, kOurs.data(), kOurs.size(), MSG_NOSIGNAL) != static_cast<ssize_t>(kOurs.size()))
        return Greeting::none;
    std::array<char, kWantedBytes> text{};
    std::size_t n = 0;
    while (n < text.size()) {
        if (!wait_for(fd, POLLIN, deadline)) return Greeting::none;
        const ssize_t got = ::recv(fd, text.data() + n, text.size() - n, 0);
        if (got < 0 && (errno == EINTR || errno == EAGAIN)) continue;
        if (got <= 0) return Greeting::none;
        n += static_cast<std::size_t>(got);
    }
    const std::string_view mechanism(text.data() + kMechanismOffset, kMechanismBytes);
    if (text[0] != '\xff') return Greeting::none;
    if (mechanism.starts_with("CURVE")) return Greeting::curve;
    return mechanism.starts_with("NULL") ? Greeting::plain : Greeting::none;
}

}  // namespace

Greeting read_greeting(const Endpoint& endpoint, Deadline deadline) {
    addrinfo hints = {};
    // As ZmqLink: version 6 only if it is written so.
    hints.ai_family = endpoint.text.find('[') == std::string::npos ? AF_INET : AF_INET6;
    hints.ai_socktype = SOCK_STREAM;
    addrinfo* found = nullptr;
    if (::getaddrinfo(endpoint.host.c_str(), endpoint.port.c_str(), &hints, &found) != 0)
        return Greeting::none;
    const std::unique_ptr<addrinfo, decltype(&::freeaddrinfo)> owner(found, ::freeaddrinfo);
    for (const addrinfo* at = found; at != nullptr; at = at->ai_next) {
        const Fd fd = connect_to(*at, deadline);
        if (fd.valid()) return converse(fd.get(), deadline);
    }
    return Greeting::none;
}

}  // namespace k3::transport
