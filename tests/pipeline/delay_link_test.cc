// The network link of the tests: late, lossy and slow as it was told, and every byte as it was.

#include "tests/support/delay_link.h"

#include <arpa/inet.h>
#include <doctest/doctest.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sched.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <future>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "common/base/deadline.h"
#include "launcher/run_program.h"
#include "tests/support/boxes.h"

using namespace k3;
using namespace k3::test;

namespace {

constexpr std::uint16_t kPort = 7000;  // of an address that nobody else has
constexpr std::int64_t kMs = 30000;

/// A command in the network of the calling thread.
bool run(const std::string& command) {
    auto run = launcher::run_program({"/bin/sh", "-c", command}, Deadline::after_ms(kMs));
    const bool ok = run.has_value() && run->ending.exit_code() == 0;
    if (run.has_value() && !ok) std::printf("%s: %s\n", command.c_str(), run->output.c_str());
    return ok;
}

sockaddr_in far_address() {
    sockaddr_in address = {};
    address.sin_family = AF_INET;
    address.sin_port = htons(kPort);
    ::inet_pton(AF_INET, "10.78.0.2", &address.sin_addr);
    return address;
}

void set_wait(const Fd& fd) {
    const timeval wait = {kMs / 1000, 0};
    for (int option : {SO_RCVTIMEO, SO_SNDTIMEO})
        ::setsockopt(fd.get(), SOL_SOCKET, option, &wait, sizeof wait);
    const int on = 1;
    ::setsockopt(fd.get(), IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
}

/// This thread's network, and another one with a server that sends back what it is sent; between
/// the two the interfaces k3one and k3other for a link.
class TwoNetworks {
  public:
    TwoNetworks() {
        REQUIRE(::unshare(CLONE_NEWNET) == 0);
        std::promise<pid_t> made;
        std::promise<bool> moved;
        std::promise<bool> ready;
        server_ = std::thread([this, &made, &ready, moved = moved.get_future()]() mutable {
            const bool alone = ::unshare(CLONE_NEWNET) == 0;
            made.set_value(alone ? static_cast<pid_t>(::syscall(SYS_gettid)) : -1);
            const bool is_up = moved.get() && run("ip link set lo up && "
                                                  "ip addr add 10.78.0.2/24 dev eth0 && "
                                                  "ip link set eth0 up");
            if (is_up) listener_ = listen();
            ready.set_value(listener_.valid());
            if (listener_.valid()) serve();
        });
        const pid_t thread = made.get_future().get();
        moved.set_value(thread > 0 &&
                        run("ip link set lo up && ip link add k3here type veth peer name k3one && "
                            "ip addr add 10.78.0.1/24 dev k3here && ip link set k3here up && "
                            "ip link add k3other type veth peer name eth0 netns " +
                            std::to_string(thread)));
        const bool is_ready = ready.get_future().get();
        if (!is_ready) server_.join();
        REQUIRE(is_ready);
    }
    ~TwoNetworks() {
        is_over_ = true;
        for (int fd : {listener_.get(), client_.load()}) ::shutdown(fd, SHUT_RDWR);
        server_.join();
    }
    TwoNetworks(const TwoNetworks&) = delete;
    TwoNetworks& operator=(const TwoNetworks&) = delete;

    static Fd connect() {
        const Deadline deadline = Deadline::after_ms(kMs);
        const sockaddr_in address = far_address();
        for (;;) {
            Fd fd(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
            set_wait(fd);
            if (::connect(fd.get(), reinterpret_cast<const sockaddr*>(&address), sizeof address) ==
                0)
                return fd;
            if (deadline.expired()) return Fd();
            std::this_thread::sleep_for(std::chrono::milliseconds(5));
        }
    }

  private:
    static Fd listen() {
        Fd listener(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
        const sockaddr_in address = far_address();
        if (::bind(listener.get(), reinterpret_cast<const sockaddr*>(&address), sizeof address) !=
                0 ||
            ::listen(listener.get(), 8) != 0)
            return Fd();
        return listener;
    }
    void serve() {
        for (;;) {
            const Fd client(::accept(listener_.get(), nullptr, nullptr));
            client_ = client.get();
            if (!client.valid() || is_over_) return;
            set_wait(client);
            char buffer[65536];
            for (;;) {
                const ssize_t got = ::recv(client.get(), buffer, sizeof buffer, 0);
                if (got <= 0 || ::send(client.get(), buffer, static_cast<std::size_t>(got),
                                       MSG_NOSIGNAL) != got)
                    break;
            }
            client_ = -1;
        }
    }
    Fd listener_;
    std::atomic<int> client_ = -1;
    std::atomic<bool> is_over_ = false;
    std::thread server_;
};

/// Sends `bytes` and compares what comes back; the seconds that it took.
double echo(const Fd& fd, const std::vector<char>& bytes) {
    const Clock::time_point begin = Clock::now();
    std::thread sender([&] {
        for (std::size_t sent = 0; sent < bytes.size();) {
            const ssize_t n =
                ::send(fd.get(), bytes.data() + sent, bytes.size() - sent, MSG_NOSIGNAL);
            if (n <= 0) return;
            sent += static_cast<std::size_t>(n);
        }
    });
    std::vector<char> back(bytes.size());
    std::size_t got = 0;
    while (got < back.size()) {
        const ssize_t n = ::recv(fd.get(), back.data() + got, back.size() - got, 0);
        if (n <= 0) break;
        got += static_cast<std::size_t>(n);
    }
    sender.join();
    CHECK(got == bytes.size());
    CHECK(back == bytes);
    return std::chrono::duration<double>(Clock::now() - begin).count();
}

std::vector<char> random_bytes(std::size_t n) {
    std::mt19937 random(7);
    std::vector<char> bytes(n);
    for (char& byte : bytes) byte = static_cast<char>(random());
    return bytes;
}

double cpu_seconds() {
    rusage usage = {};
    ::getrusage(RUSAGE_SELF, &usage);
    const auto of = [](const timeval& t) {
        return static_cast<double>(t.tv_sec) + static_cast<double>(t.tv_usec) * 1e-6;
    };
    return of(usage.ru_utime) + of(usage.ru_stime);
}

}  // namespace

TEST_CASE("a link delays, loses and limits what it was told to, and changes no byte" *
          doctest::skip(!boxes_can_be_made())) {
    TwoNetworks networks;
    DelayLink link("k3one", "k3other", {});
    { echo(TwoNetworks::connect(), random_bytes(4 << 20)); }
    CHECK(link.counts().n_passed > 0);
    CHECK(link.counts().n_lost == 0);

    // Round trips of a byte: at least twice the delay, every one of them.
    LinkShape shape;
    shape.delay_us = 5000;
    shape.jitter_us = 1000;
    link.set_shape(shape);
    {
        const Fd fd = TwoNetworks::connect();
        double shortest = 1;
        double longest = 0;
        for (int i = 0; i < 20; ++i) {
            const double seconds = echo(fd, {static_cast<char>(i)});
            shortest = std::min(shortest, seconds);
            longest = std::max(longest, seconds);
        }
        CHECK(shortest >= 0.010);
        CHECK(longest > shortest + 0.0001);  // jitter
        // Many frames on their way, in their order.
        echo(fd, random_bytes(1 << 20));
    }
    // Nobody waits by looking again and again: this process sleeps while nothing passes.
    {
        const double before = cpu_seconds();
        const Clock::time_point until = Clock::now() + std::chrono::milliseconds(300);
        std::this_thread::sleep_until(until);
        CHECK(cpu_seconds() - before < 0.1);
    }
    // 5 % of the frames do not arrive, and TCP repairs it.
    shape = {};
    shape.loss_per_1000 = 50;
    link.set_shape(shape);
    {
        const Fd fd = TwoNetworks::connect();
        for (int i = 0; i < 100 && link.counts().n_lost == 0; ++i)
            echo(fd, random_bytes(std::size_t{64} << 10U));
    }
    CHECK(link.counts().n_lost > 0);

    // There and back, a megabyte takes a tenth of a second each way at least.
    shape = {};
    shape.bytes_per_s = 10 << 20;
    link.set_shape(shape);
    CHECK(echo(TwoNetworks::connect(), random_bytes(1 << 20)) >= 0.1);

    // Nothing passes.
    link.set_shape({.loss_per_1000 = 1000});
    {
        const Fd fd(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
        const sockaddr_in address = far_address();
        const std::uint64_t n_lost = link.counts().n_lost;
        ::connect(fd.get(), reinterpret_cast<const sockaddr*>(&address), sizeof address);
        const Deadline deadline = Deadline::after_ms(kMs);
        while (link.counts().n_lost == n_lost && !deadline.expired())
            std::this_thread::sleep_for(std::chrono::milliseconds(1));
        CHECK(link.counts().n_lost > n_lost);
        pollfd connected = {fd.get(), POLLOUT, 0};
        CHECK(::poll(&connected, 1, 0) == 0);
    }
    link.set_shape({});
}
