#include "common/transport/heartbeat.h"

#include <arpa/inet.h>
#include <doctest/doctest.h>
#include <signal.h>
#include <sys/socket.h>

#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "tests/support/fake_peer.h"
#include "tests/unit/common/transport/fixtures.h"
#include "tests/unit/common/transport/process.h"

using namespace k3;
using namespace k3::transport;
using namespace k3::transport::test;

namespace {

using Door = Vitals::Door;

constexpr std::int64_t kLongMs = 15000;  // for what should come within a second or two

std::unique_ptr<Heartbeat> watch(const std::string& endpoint) {
    Heartbeat::Options options;
    options.endpoints = {endpoint};
    options.ping_ms = 20;
    options.doubt_ms = 100;
    options.silence_ms = 400;
    return std::move(Heartbeat::start(options)).value();
}

/// Looks again with every news, and now and then without.
bool becomes(const Heartbeat& heartbeat, const std::function<bool(const Vitals&)>& wanted) {
    const Deadline deadline = Deadline::after_ms(kLongMs);
    while (!deadline.expired()) {
        const std::uint64_t seen = heartbeat.n_news();
        if (wanted(heartbeat.look(0))) return true;
        heartbeat.wait_for_news(seen, Deadline::after_ms(20));
    }
    return false;
}

bool answers(const Vitals& vitals) { return vitals.answers && !vitals.is_silent; }

/// A TCP endpoint to which nothing comes back: its queue of connections is full, and the kernel
/// throws away what else asks.
class DeafEndpoint {
  public:
    DeafEndpoint() {
        sockaddr_in address{};
        address.sin_family = AF_INET;
        address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
        socklen_t size = sizeof(address);
        auto* generic = reinterpret_cast<sockaddr*>(&address);
        listener_ = Fd(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
        REQUIRE(::bind(listener_.get(), generic, size) == 0);
        REQUIRE(::listen(listener_.get(), 0) == 0);
        REQUIRE(::getsockname(listener_.get(), generic, &size) == 0);
        port_ = ntohs(address.sin_port);
        for (int i = 0; i < 4; ++i) {
            Fd& fd = fillers_.emplace_back(
                ::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
            static_cast<void>(::connect(fd.get(), generic, size));
        }
    }
    std::string endpoint() const { return "tcp://127.0.0.1:" + std::to_string(port_); }

  private:
    Fd listener_;
    std::vector<Fd> fillers_;
    int port_ = 0;
};

}  // namespace

TEST_CASE("a peer that is there answers, says its state, and what it computes is seen") {
    Sockets sockets;
    auto server = make_server(sockets.endpoint("s"), false);
    auto heartbeat = watch(sockets.endpoint("s"));
    CHECK(becomes(*heartbeat, answers));
    CHECK(heartbeat->look(0).state == msg::State::loading);
    CHECK(heartbeat->look(0).instance == server->instance());
    server->set_ready({});
    CHECK(becomes(*heartbeat, [](const Vitals& v) { return v.state == msg::State::ready; }));
    server->work().advance();
    server->work().waits_for_reads = true;
    CHECK(becomes(*heartbeat, [](const Vitals& v) { return v.waits_for_reads; }));
    // It goes on answering and gets nowhere, until it does.
    CHECK(becomes(*heartbeat, [](const Vitals& v) { return v.stalled_ms > 200; }));
    CHECK(answers(heartbeat->look(0)));
    server->work().advance();
    CHECK(becomes(*heartbeat, [](const Vitals& v) { return v.stalled_ms < 200; }));
}

TEST_CASE("a peer that ends is known to be gone, and its successor is met as another instance") {
    Sockets sockets;
    auto server = make_server(sockets.endpoint("s"));
    auto heartbeat = watch(sockets.endpoint("s"));
    CHECK(becomes(*heartbeat, answers));
    const std::uint64_t first = server->instance();
    server.reset();
    CHECK(becomes(*heartbeat, [](const Vitals& v) { return !v.answers; }));
    CHECK(becomes(*heartbeat, [](const Vitals& v) { return v.door == Door::refuses; }));
    CHECK(becomes(*heartbeat, [](const Vitals& v) { return v.is_silent; }));
    server = make_server(sockets.endpoint("s"));
    CHECK(becomes(*heartbeat, answers));
    CHECK(heartbeat->look(0).instance == server->instance());
    CHECK(heartbeat->look(0).instance != first);
    CHECK(heartbeat->look(0).door == Door::unknown);
}

TEST_CASE(
    "a process that is stopped is silent behind a door that opens, and answers when it goes on") {
    Sockets sockets;
    PeerProcess peer(sockets.endpoint("s"));
    auto heartbeat = watch(sockets.endpoint("s"));
    CHECK(becomes(*heartbeat, answers));
    const std::uint64_t instance = heartbeat->look(0).instance;
    peer.signal(SIGSTOP);
    CHECK(becomes(*heartbeat, [](const Vitals& v) { return v.is_silent; }));
    CHECK(becomes(*heartbeat, [](const Vitals& v) { return v.door == Door::accepts; }));
    peer.signal(SIGCONT);
    CHECK(becomes(*heartbeat, answers));
    CHECK(heartbeat->look(0).instance == instance);
}

TEST_CASE("a successor of another protocol version is told from one that is silent") {
    Sockets sockets;
    auto server = make_server(sockets.endpoint("s"));
    auto heartbeat = watch(sockets.endpoint("s"));
    CHECK(becomes(*heartbeat, answers));
    server.reset();
    auto foreign =
        std::make_unique<k3::test::FakePeer>(sockets.endpoint("s"), [](const msg::Envelope& ping) {
            return k3::test::of_another_version({0, ping.call_id, msg::Pong{}});
        });
    CHECK(becomes(*heartbeat, [](const Vitals& v) { return v.is_foreign && !v.is_silent; }));
    CHECK_FALSE(heartbeat->look(0).answers);
    CHECK(heartbeat->look(0).instance == 0);
    foreign.reset();
    CHECK(becomes(*heartbeat, [](const Vitals& v) { return !v.is_foreign; }));
    server = make_server(sockets.endpoint("s"));
    CHECK(becomes(*heartbeat, answers));
    CHECK(heartbeat->look(0).instance == server->instance());
}

TEST_CASE("a box from which nothing comes back is told from one that refuses") {
    const DeafEndpoint deaf;
    auto heartbeat = watch(deaf.endpoint());
    CHECK(becomes(*heartbeat, [](const Vitals& v) { return v.door == Door::silent; }));
    CHECK(becomes(*heartbeat, [](const Vitals& v) { return v.is_silent; }));
    CHECK_FALSE(heartbeat->look(0).answers);
    CHECK(heartbeat->look(0).instance == 0);
}
