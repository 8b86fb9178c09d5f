#include "tests/support/socket_proxy.h"

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

sockaddr_un address_of(const std::string& endpoint) {
    const std::string path = endpoint.substr(std::strlen("ipc://"));
    sockaddr_un address{};
    address.sun_family = AF_UNIX;
    K3_CHECK(path.size() < sizeof(address.sun_path), path);
    std::memcpy(address.sun_path, path.c_str(), path.size());
    return address;
}

}  // namespace

SocketProxy::SocketProxy(const std::string& front, const std::string& back)
    : back_(back), listener_(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0)) {
    const sockaddr_un address = address_of(front);
    const auto* generic = reinterpret_cast<const sockaddr*>(&address);
    K3_CHECK(::bind(listener_.get(), generic, sizeof(address)) == 0, front);
    K3_CHECK(::listen(listener_.get(), 16) == 0, front);
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
        std::vector<pollfd> waits{{listener_.get(), POLLIN, 0}};
        for (const Link& link : links_) {
            waits.push_back({link.client.get(), POLLIN, 0});
            waits.push_back({link.service.get(), POLLIN, 0});
        }
        if (::poll(waits.data(), waits.size(), 5) <= 0) continue;
        std::vector<Link> alive;
        for (std::size_t i = 0; i < links_.size(); ++i) {
            const bool from_client = waits[1 + 2 * i].revents != 0;
            const bool from_service = waits[2 + 2 * i].revents != 0;
            if (from_client && !pump(links_[i].client, links_[i].service)) continue;
            if (from_service && !pump(links_[i].service, links_[i].client)) continue;
            alive.push_back(std::move(links_[i]));
        }
        links_ = std::move(alive);
        if (waits[0].revents != 0) accept_one();
    }
}

void SocketProxy::accept_one() {
    Link link{Fd(::accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC)),
              Fd(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0))};
    const sockaddr_un address = address_of(back_);
    const auto* generic = reinterpret_cast<const sockaddr*>(&address);
    // A service that is not there: the client is hung up on, as without the proxy.
    if (!link.client.valid() || ::connect(link.service.get(), generic, sizeof(address)) != 0)
        return;
    links_.push_back(std::move(link));
}

/// Passes on what there is; false at the end of the connection.
bool SocketProxy::pump(const Fd& from, const Fd& to) {
    std::array<char, 65536> buffer{};
    const ssize_t n = ::read(from.get(), buffer.data(), buffer.size());
    if (n <= 0) return false;
    ssize_t done = 0;
    while (done < n) {
        const ssize_t sent = ::send(to.get(), buffer.data() + done,
                                    static_cast<std::size_t>(n - done), MSG_NOSIGNAL);
        if (sent <= 0) return false;
        done += sent;
    }
    return true;
}

}  // namespace k3::test
