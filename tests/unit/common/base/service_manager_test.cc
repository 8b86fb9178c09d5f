#include "common/base/service_manager.h"

#include <doctest/doctest.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <array>
#include <cstdlib>
#include <cstring>
#include <string>

#include "tests/support/checkpoint_copy.h"

using namespace k3;

namespace {

/// The environment of a service, for as long as this lives.
class Manager {
  public:
    explicit Manager(std::string place) : place_(std::move(place)) {
        sockaddr_un address = {};
        address.sun_family = AF_UNIX;
        std::memcpy(address.sun_path, place_.c_str(), place_.size());
        if (place_.front() == '@') address.sun_path[0] = '\0';
        const auto size = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + place_.size() +
                                                 (place_.front() == '@' ? 0 : 1));
        REQUIRE(::bind(fd_.get(), reinterpret_cast<sockaddr*>(&address), size) == 0);
        ::setenv("NOTIFY_SOCKET", place_.c_str(), 1);
    }
    ~Manager() {
        for (const char* name : {"NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID"})
            ::unsetenv(name);
    }
    Manager(const Manager&) = delete;
    Manager& operator=(const Manager&) = delete;

    /// The next message; empty if there is none.
    std::string next() {
        std::array<char, 1024> buffer{};
        const ssize_t got = ::recv(fd_.get(), buffer.data(), buffer.size(), MSG_DONTWAIT);
        return got <= 0 ? "" : std::string(buffer.data(), static_cast<std::size_t>(got));
    }

  private:
    std::string place_;
    Fd fd_{::socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0)};
};

}  // namespace

TEST_CASE("a manager is told progress with more time for it, readiness and the end") {
    test::TempDir dir;
    for (const std::string& place :
         {(dir.path() / "notify").string(), "@k3-notify-" + std::to_string(::getpid())}) {
        Manager manager(place);
        ServiceManager service = ServiceManager::from_environment();
        REQUIRE(service.is_there());
        service.loading(423, "layer\n4");
        CHECK(manager.next() == "EXTEND_TIMEOUT_USEC=120000000\nSTATUS=loading 42 %, layer 4\n");
        service.loading(424, "layer 5");  // within a second
        CHECK(manager.next().empty());
        service.ready();
        CHECK(manager.next() == "READY=1\nSTATUS=ready\n");
        service.failed("no such file");
        CHECK(manager.next() == "STATUS=no such file\n");
        service.stopping();
        CHECK(manager.next() == "STOPPING=1\nSTATUS=stopping\n");
        service.alive(Clock::now());  // nobody watches
        CHECK(manager.next().empty());
    }
}

TEST_CASE("a watchdog is fed twice in its period, by the process that it watches") {
    test::TempDir dir;
    Manager manager((dir.path() / "notify").string());
    ::setenv("WATCHDOG_USEC", "1000000", 1);
    ::setenv("WATCHDOG_PID", std::to_string(::getpid()).c_str(), 1);
    ServiceManager service = ServiceManager::from_environment();
    const Clock::time_point now = Clock::now();
    for (int ms : {0, 100, 499, 500, 600, 1000}) {
        service.alive(now + std::chrono::milliseconds(ms));
        CHECK(manager.next() == (ms % 500 == 0 ? "WATCHDOG=1\n" : ""));
    }
    ::setenv("WATCHDOG_PID", "1", 1);
    service = ServiceManager::from_environment();
    service.alive(now);
    CHECK(manager.next().empty());
}

TEST_CASE("without a manager, or with one that is gone, nothing is said and nothing fails") {
    ::unsetenv("NOTIFY_SOCKET");
    ServiceManager::from_environment().ready();
    ::setenv("NOTIFY_SOCKET", "relative", 1);
    CHECK_FALSE(ServiceManager::from_environment().is_there());
    test::TempDir dir;
    ::setenv("NOTIFY_SOCKET", (dir.path() / "gone").c_str(), 1);
    ServiceManager service = ServiceManager::from_environment();
    service.ready();
    service.alive(Clock::now());
    ::unsetenv("NOTIFY_SOCKET");
}
