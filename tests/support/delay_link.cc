#include "tests/support/delay_link.h"

#include <arpa/inet.h>
#include <doctest/doctest.h>
#include <linux/if_ether.h>
#include <linux/if_packet.h>
#include <net/if.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <optional>

namespace k3::test {

namespace {

constexpr std::size_t kOffloadHeaderBytes = 10;  // virtio_net_hdr, which we only carry
constexpr std::size_t kMostFrameBytes = kOffloadHeaderBytes + 18 + 65536;
constexpr std::size_t kMostWaitingBytes = std::size_t{16} << 20U;
constexpr int kSocketBytes = 8 << 20;  // frames that arrive while the thread gets no CPU

/// Up and without ARP: frames on it are for others, and this machine must not answer them.
void take_up(const Fd& socket, const std::string& interface) {
    ifreq request = {};
    interface.copy(request.ifr_name, IFNAMSIZ - 1);
    REQUIRE_MESSAGE(::ioctl(socket.get(), SIOCGIFFLAGS, &request) == 0,
                    interface << ": " << std::strerror(errno));
    request.ifr_flags = static_cast<short>(request.ifr_flags | IFF_UP | IFF_NOARP);
    REQUIRE(::ioctl(socket.get(), SIOCSIFFLAGS, &request) == 0);
}

Fd open_interface(const std::string& interface) {
    // Of no protocol until it is bound: else it would hear all interfaces for a moment.
    Fd fd(::socket(AF_PACKET, SOCK_RAW | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
    REQUIRE(fd.valid());
    const int on = 1;
    REQUIRE(::setsockopt(fd.get(), SOL_PACKET, PACKET_VNET_HDR, &on, sizeof on) == 0);
    REQUIRE(::setsockopt(fd.get(), SOL_PACKET, PACKET_IGNORE_OUTGOING, &on, sizeof on) == 0);
    for (int option : {SO_RCVBUFFORCE, SO_SNDBUFFORCE})
        ::setsockopt(fd.get(), SOL_SOCKET, option, &kSocketBytes, sizeof kSocketBytes);
    take_up(fd, interface);
    sockaddr_ll address = {};
    address.sll_family = AF_PACKET;
    address.sll_protocol = htons(ETH_P_ALL);
    address.sll_ifindex = static_cast<int>(::if_nametoindex(interface.c_str()));
    REQUIRE(::bind(fd.get(), reinterpret_cast<const sockaddr*>(&address), sizeof address) == 0);
    return fd;
}

}  // namespace

DelayLink::DelayLink(const std::string& one, const std::string& other, const LinkShape& shape)
    : sockets_{open_interface(one), open_interface(other)},
      buffer_(kMostFrameBytes),
      stop_(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
    REQUIRE(stop_.valid());
    for (std::size_t i = 0; i < 2; ++i) {
        directions_[i].from = sockets_[i].get();
        directions_[i].to = sockets_[1 - i].get();
    }
    set_shape(shape);
    thread_ = std::thread([this] { run(); });
}

DelayLink::~DelayLink() {
    const std::uint64_t one = 1;
    [[maybe_unused]] ssize_t written = ::write(stop_.get(), &one, sizeof one);
    thread_.join();
}

void DelayLink::set_shape(const LinkShape& shape) {
    std::lock_guard lock(mutex_);
    shape_ = shape;
    for (std::size_t i = 0; i < 2; ++i) directions_[i].random.seed(shape.seed * 2 + i);
}

DelayLink::Counts DelayLink::counts() const noexcept { return {n_passed_, n_lost_, n_dropped_}; }

void DelayLink::run() {
    for (;;) {
        const Clock::time_point now = Clock::now();
        std::optional<Clock::time_point> next;
        for (Direction& direction : directions_) {
            send_due(direction, now);
            if (direction.frames.empty()) continue;
            const Clock::time_point due = direction.frames.front().due;
            next = next.has_value() ? std::min(*next, due) : due;
        }
        timespec wait = {};
        if (next.has_value()) {
            const auto ns = std::chrono::duration_cast<std::chrono::nanoseconds>(
                std::max(*next - Clock::now(), Clock::duration::zero()));
            wait.tv_sec = static_cast<time_t>(ns.count() / 1'000'000'000);
            wait.tv_nsec = static_cast<long>(ns.count() % 1'000'000'000);
        }
        std::array<pollfd, 3> fds = {{{stop_.get(), POLLIN, 0},
                                      {sockets_[0].get(), POLLIN, 0},
                                      {sockets_[1].get(), POLLIN, 0}}};
        ::ppoll(fds.data(), fds.size(), next.has_value() ? &wait : nullptr, nullptr);
        if (fds[0].revents != 0) return;
        for (std::size_t i = 0; i < 2; ++i)
            if (fds[1 + i].revents != 0) read_all(directions_[i]);
    }
}

void DelayLink::read_all(Direction& direction) {
    for (;;) {
        const ssize_t got = ::recv(direction.from, buffer_.data(), buffer_.size(), MSG_TRUNC);
        // An interface that goes down says so once; nothing comes from it then.
        if (got < 0 && (errno == EINTR || errno == ENETDOWN)) continue;
        if (got < 0) return;
        if (static_cast<std::size_t>(got) > buffer_.size())
            ++n_dropped_;
        else
            enqueue(direction, static_cast<std::size_t>(got));
    }
}

void DelayLink::enqueue(Direction& direction, std::size_t bytes) {
    LinkShape shape;
    std::uint64_t luck = 0;
    std::uint64_t jitter = 0;
    {
        std::lock_guard lock(mutex_);
        shape = shape_;
        luck = direction.random() % 1000;
        jitter = direction.random();
    }
    if (luck < shape.loss_per_1000) {
        ++n_lost_;
        return;
    }
    if (direction.waiting_bytes + bytes > kMostWaitingBytes) {
        ++n_dropped_;
        return;
    }
    using std::chrono::microseconds;
    using std::chrono::nanoseconds;
    direction.free_at = std::max(direction.free_at, Clock::now());
    if (shape.bytes_per_s > 0)
        direction.free_at += nanoseconds(bytes * 1'000'000'000 / shape.bytes_per_s);
    const auto more =
        static_cast<std::int64_t>(jitter % (static_cast<std::uint64_t>(shape.jitter_us) + 1));
    direction.last_due =
        std::max(direction.last_due, direction.free_at + microseconds(shape.delay_us + more));
    direction.frames.push_back(
        {direction.last_due,
         {buffer_.begin(), buffer_.begin() + static_cast<std::ptrdiff_t>(bytes)}});
    direction.waiting_bytes += bytes;
}

void DelayLink::send_due(Direction& direction, Clock::time_point now) {
    while (!direction.frames.empty() && direction.frames.front().due <= now) {
        const std::vector<std::byte>& bytes = direction.frames.front().bytes;
        const ssize_t sent = ::send(direction.to, bytes.data(), bytes.size(), 0);
        ++(sent == static_cast<ssize_t>(bytes.size()) ? n_passed_ : n_dropped_);
        direction.waiting_bytes -= bytes.size();
        direction.frames.pop_front();
    }
}

}  // namespace k3::test
