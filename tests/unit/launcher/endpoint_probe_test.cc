#include "launcher/endpoint_probe.h"

#include <doctest/doctest.h>
#include <netdb.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <sys/un.h>

#include <cstring>
#include <string>
#include <vector>

#include "common/base/deadline.h"
#include "common/base/fd.h"
#include "tests/support/checkpoint_copy.h"

using namespace k3;
using namespace k3::launcher;
using Finding = EndpointProbe::Finding;

namespace {

/// A socket bound to any free port of the loopback address; nobody listens on it yet.
struct Port {
    Fd fd{::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)};
    sockaddr_in address = {};

    Port() {
        address.sin_family = AF_INET;
        address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
        REQUIRE(::bind(fd.get(), reinterpret_cast<sockaddr*>(&address), sizeof address) == 0);
        socklen_t size = sizeof address;
        REQUIRE(::getsockname(fd.get(), reinterpret_cast<sockaddr*>(&address), &size) == 0);
    }
    std::string number() const { return std::to_string(ntohs(address.sin_port)); }
};

Fd bound_socket_file(const std::string& path) {
    Fd fd(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
    sockaddr_un address = {};
    address.sun_family = AF_UNIX;
    std::memcpy(address.sun_path, path.c_str(), path.size() + 1);
    REQUIRE(::bind(fd.get(), reinterpret_cast<sockaddr*>(&address), sizeof address) == 0);
    return fd;
}

constexpr std::int64_t kLong = 20000;  // longer than any of these may take

}  // namespace

TEST_CASE("a socket file shows whether somebody listens on it") {
    test::TempDir temp;
    std::string path = (temp.path() / "s").string();
    EndpointProbe missing = probe_endpoint("ipc://" + path, kLong);
    CHECK(missing.finding == Finding::absent);
    CHECK(missing.reason == "there is no such socket file");
    Fd fd = bound_socket_file(path);
    SUBCASE("nobody yet") {
        EndpointProbe stale = probe_endpoint("ipc://" + path, kLong);
        CHECK(stale.finding == Finding::absent);
        CHECK(stale.reason == "nobody listens on that socket file");
    }
    SUBCASE("a process that is gone") {
        REQUIRE(::listen(fd.get(), 1) == 0);
        fd.reset();
        CHECK(probe_endpoint("ipc://" + path, kLong).finding == Finding::absent);
    }
    SUBCASE("somebody, even when the queue of connections is full") {
        REQUIRE(::listen(fd.get(), 0) == 0);
        for (int i = 0; i < 4; ++i)
            CHECK(probe_endpoint("ipc://" + path, kLong).finding == Finding::listening);
    }
}

TEST_CASE("a port shows whether somebody listens on it") {
    Port port;
    EndpointProbe refused = probe_endpoint("tcp://127.0.0.1:" + port.number(), kLong);
    CHECK(refused.finding == Finding::absent);
    CHECK(refused.reason == "the connection is refused");
    REQUIRE(::listen(port.fd.get(), 8) == 0);
    CHECK(probe_endpoint("tcp://127.0.0.1:" + port.number(), kLong).finding == Finding::listening);
    EndpointProbe by_name = probe_endpoint("tcp://localhost:" + port.number(), kLong);
    addrinfo* found = nullptr;
    if (::getaddrinfo("localhost", nullptr, nullptr, &found) == 0) {
        CHECK(by_name.finding == Finding::listening);
        ::freeaddrinfo(found);
    } else {  // no /etc/hosts, in a bare container
        CHECK(by_name.finding == Finding::absent);
        CHECK(by_name.reason.find("localhost") != std::string::npos);
    }
}

TEST_CASE("a host that does not react is given up in the time granted") {
    Port port;
    REQUIRE(::listen(port.fd.get(), 0) == 0);
    // With its queue full the kernel drops further connections without a word.
    Clock::time_point asked;
    EndpointProbe probe;
    for (int i = 0; i < 16; ++i) {
        asked = Clock::now();
        probe = probe_endpoint("tcp://127.0.0.1:" + port.number(), 100);
        if (probe.finding != Finding::listening) break;
    }
    CHECK(probe.finding == Finding::silent);
    CHECK(probe.reason == "the host does not react within 100 ms");
    CHECK(Clock::now() - asked >= std::chrono::milliseconds(100));
}

TEST_CASE("nobody listens under a name that means nothing, and at what is no endpoint") {
    // Where no resolver answers at all this is silence.
    EndpointProbe unknown = probe_endpoint("tcp://no-such-host.invalid:1", 2000);
    CHECK(unknown.finding != Finding::listening);
    CHECK(unknown.reason.find("no-such-host.invalid ") == 0);
    CHECK(probe_endpoint("tcp://127.0.0.1", kLong).finding == Finding::absent);
    CHECK(probe_endpoint("nonsense", kLong).finding == Finding::absent);
}
