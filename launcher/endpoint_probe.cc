#include "launcher/endpoint_probe.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/un.h>

#include <cerrno>
#include <cstdlib>
#include <cstring>

#include "common/base/fd.h"

namespace k3::launcher {

namespace {

constexpr int kWaitMs = 200;  // of an address that does not answer at all

bool accepts(const sockaddr* address, socklen_t size) {
    Fd fd(::socket(address->sa_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
    if (!fd.valid()) return false;
    if (::connect(fd.get(), address, size) == 0) return true;
    if (errno != EINPROGRESS && errno != EAGAIN) return false;
    pollfd wait{fd.get(), POLLOUT, 0};
    int problem = 0;
    socklen_t length = sizeof problem;
    return ::poll(&wait, 1, kWaitMs) == 1 &&
           ::getsockopt(fd.get(), SOL_SOCKET, SO_ERROR, &problem, &length) == 0 && problem == 0;
}

bool ipc_accepts(const std::string& path) {
    sockaddr_un address = {};
    address.sun_family = AF_UNIX;
    if (path.size() >= sizeof address.sun_path) return false;
    std::memcpy(address.sun_path, path.c_str(), path.size() + 1);
    return accepts(reinterpret_cast<const sockaddr*>(&address), sizeof address);
}

bool tcp_accepts(const std::string& place) {
    std::size_t colon = place.rfind(':');
    if (colon == std::string::npos) return false;
    sockaddr_in address = {};
    address.sin_family = AF_INET;
    address.sin_port = htons(static_cast<std::uint16_t>(std::atoi(place.c_str() + colon + 1)));
    std::string host = place.substr(0, colon);
    if (host == "localhost") host = "127.0.0.1";
    if (::inet_pton(AF_INET, host.c_str(), &address.sin_addr) != 1) return false;
    return accepts(reinterpret_cast<const sockaddr*>(&address), sizeof address);
}

}  // namespace

bool somebody_listens(const std::string& endpoint) {
    if (endpoint.starts_with("ipc://")) return ipc_accepts(endpoint.substr(6));
    if (endpoint.starts_with("tcp://")) return tcp_accepts(endpoint.substr(6));
    return false;
}

}  // namespace k3::launcher
