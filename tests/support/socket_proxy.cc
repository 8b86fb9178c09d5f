#include "tests/support/socket_proxy.h"

#include <arpa/inet.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <array>
#include <chrono>
#include <cstring>

#include "common/base/check.h"

namespace k3::test {

namespace {

constexpr int kRoundMs = 5;

sockaddr_un address_of(const std::string& endpoint) {
    const std::string path = endpoint.substr(std::strlen("ipc://"));
    sockaddr_un address{};
    address.sun_family = AF_UNIX;
    K3_CHECK(path.size() < sizeof(address.sun_path), path);
    std::memcpy(address.sun_path, path.c_str(), path.size());
    return address;
}

Fd listen_on_path(const std::string& front) {
    Fd listener(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
    const sockaddr_un address = address_of(front);
    const auto* generic = reinterpret_cast<const sockaddr*>(&address);
    K3_CHECK(::bind(listener.get(), generic, sizeof(address)) == 0, front);
    K3_CHECK(::listen(listener.get(), 16) == 0, front);
    return listener;
}

/// Writes the endpoint with the port.
Fd listen_on_any_port(std::string& endpoint) {
    Fd listener(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    socklen_t size = sizeof(address);
    auto* generic = reinterpret_cast<sockaddr*>(&address);
    K3_CHECK(::bind(listener.get(), generic, size) == 0, endpoint);
    K3_CHECK(::listen(listener.get(), 16) == 0, endpoint);
    K3_CHECK(::getsockname(listener.get(), generic, &size) == 0, endpoint);
    endpoint = "tcp://127.0.0.1:" + std::to_string(ntohs(address.sin_port));
    return listener;
}

}  // namespace

SocketProxy::SocketProxy(const std::string& front, const std::string& back)
    : back_(back),
      endpoint_(front),
      listener_(front.starts_with("ipc://") ? listen_on_path(front)
                                            : listen_on_any_port(endpoint_)) {
    thread_ = std::thread([this] { run(); });
}

SocketProxy::~SocketProxy() {
    stop_ = true;
    thread_.join();
}

void SocketProxy::cut() {
    cut_ = true;
    while (cut_) std::this_thread::sleep_for(std::chrono::milliseconds(1));
}

void SocketProxy::run() {
    while (!stop_) {
        if (cut_) {
            links_.clear();
            cut_ = false;
        }
        if (is_held_) {
            std::this_thread::sleep_for(std::chrono::milliseconds(kRoundMs));
            continue;
        }
        std::vector<pollfd> waits{{listener_.get(), POLLIN, 0}};
        bool is_something_late = false;
        for (const Link& link : links_) {
            waits.push_back({link.is_stalled ? -1 : link.client.get(), POLLIN, 0});
            waits.push_back({link.is_stalled ? -1 : link.service.get(), POLLIN, 0});
            is_something_late = is_something_late || !link.to_client.chunks.empty() ||
                                !link.to_service.chunks.empty();
        }
        ::poll(waits.data(), waits.size(), is_something_late ? 1 : kRoundMs);
        std::vector<Link> alive;
        for (std::size_t i = 0; i < links_.size(); ++i) {
            Link& link = links_[i];
            if (waits[1 + 2 * i].revents != 0) read_some(link.client, link.to_service);
            if (waits[2 + 2 * i].revents != 0) read_some(link.service, link.to_client);
            stall_if_wanted(link);
            const bool works = pass_on(link.service, link.to_service);
            if (pass_on(link.client, link.to_client) && works) alive.push_back(std::move(link));
        }
        links_ = std::move(alive);
        if (waits[0].revents != 0) accept_one();
    }
}

void SocketProxy::accept_one() {
    Link link{Fd(::accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC)),
              Fd(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0)),
              {},
              {}};
    const int on = 1;  // refused for a unix socket, which has nothing to delay
    static_cast<void>(::setsockopt(link.client.get(), IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on)));
    const sockaddr_un address = address_of(back_);
    const auto* generic = reinterpret_cast<const sockaddr*>(&address);
    // A service that is not there: the client is hung up on, as without the proxy.
    if (!link.client.valid() || ::connect(link.service.get(), generic, sizeof(address)) != 0)
        return;
    links_.push_back(std::move(link));
}

void SocketProxy::read_some(const Fd& from, Direction& direction) const {
    if (direction.has_ended) return;
    std::array<char, 65536> buffer{};
    const ssize_t n = ::read(from.get(), buffer.data(), buffer.size());
    if (n <= 0) {
        direction.has_ended = true;
        return;
    }
    direction.chunks.push_back(
        {Clock::now() + std::chrono::milliseconds(delay_ms_), {buffer.data(), buffer.data() + n}});
}

void SocketProxy::stall_if_wanted(Link& link) {
    if (stall_bytes_ == 0 || link.to_client.chunks.empty()) return;
    std::vector<char>& bytes = link.to_client.chunks.back().bytes;
    if (bytes.size() < stall_bytes_) return;
    bytes.resize(bytes.size() / 2);
    stall_bytes_ = 0;
    link.is_stalled = true;
    ++n_stalled_;
}

/// Writes what is due; false at the end of the connection.
bool SocketProxy::pass_on(const Fd& to, Direction& direction) {
    while (!direction.chunks.empty() && direction.chunks.front().due <= Clock::now()) {
        const std::vector<char>& bytes = direction.chunks.front().bytes;
        std::size_t done = 0;
        while (done < bytes.size()) {
            const ssize_t sent =
                ::send(to.get(), bytes.data() + done, bytes.size() - done, MSG_NOSIGNAL);
            if (sent <= 0) return false;
            done += static_cast<std::size_t>(sent);
        }
        direction.chunks.pop_front();
    }
    return !direction.has_ended || !direction.chunks.empty();
}

}  // namespace k3::test
