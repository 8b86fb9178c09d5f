// Services as processes: killed, stopped, orphaned, and what they leave behind.

#include <doctest/doctest.h>
#include <signal.h>
#include <unistd.h>

#include "common/transport/arena.h"
#include "common/transport/arena_layout.h"
#include "tests/unit/common/transport/fixtures.h"
#include "tests/unit/common/transport/process.h"

using namespace k3;
using namespace k3::transport;
using namespace k3::transport::test;

namespace {

bool file_exists(const std::string& path) { return ::access(path.c_str(), F_OK) == 0; }

std::int64_t ms_since(Clock::time_point start) {
    return std::chrono::duration_cast<std::chrono::milliseconds>(Clock::now() - start).count();
}

/// A peer, greeted, and what it left when it is gone.
struct Peer {
    explicit Peer(const std::vector<std::string>& extra = {}) : process(endpoint, extra) {
        greet(*channel);
        REQUIRE(file_exists(path));
        REQUIRE(file_exists(segment_path(process.segment())));
    }
    void check_nothing_left() const {
        CHECK_FALSE(file_exists(path));
        CHECK_FALSE(file_exists(segment_path(process.segment())));
    }

    Sockets sockets;
    std::string path = sockets.path("s");
    std::string endpoint = sockets.endpoint("s");
    PeerProcess process;
    std::unique_ptr<Channel> channel = make_channel(endpoint);
};

}  // namespace

TEST_CASE("a service asked to shut down ends with code 0 and leaves nothing") {
    Peer peer;
    Result<Reply> done = peer.channel->call(msg::Shutdown{}, {}, Deadline::after_ms(10000));
    REQUIRE(done.has_value());
    CHECK(std::holds_alternative<msg::Done>(done->body));
    CHECK(peer.process.wait_for_exit(10000) == 0);
    peer.check_nothing_left();
}

TEST_CASE("SIGTERM and SIGINT end a waiting service at once, with code 0") {
    for (int number : {SIGTERM, SIGINT}) {
        Peer peer;
        peer.process.signal(number);
        CHECK(peer.process.wait_for_exit(2500) == 0);
        peer.check_nothing_left();
    }
}

TEST_CASE("a service that computes is ended by force 3 seconds after the signal") {
    Peer peer({"--mode", "compute"});
    const Clock::time_point start = Clock::now();
    peer.process.signal(SIGTERM);
    CHECK(peer.process.wait_for_exit(5000) == 128 + SIGTERM);
    CHECK(ms_since(start) >= 2500);
    peer.check_nothing_left();
}

TEST_CASE("a second signal ends a service that computes at once") {
    Peer peer({"--mode", "compute"});
    peer.process.signal(SIGINT);
    peer.process.signal(SIGTERM);
    CHECK(peer.process.wait_for_exit(2500).has_value());
    peer.check_nothing_left();
}

TEST_CASE("the end of the lifeline ends a waiting service at once") {
    Peer peer;
    peer.process.cut_lifeline();
    CHECK(peer.process.wait_for_exit(2500) == 0);
    peer.check_nothing_left();
}

TEST_CASE("the end of the lifeline ends a service that computes within 5 seconds") {
    Peer peer({"--mode", "compute"});
    peer.process.cut_lifeline();
    CHECK(peer.process.wait_for_exit(5000).has_value());
    peer.check_nothing_left();
}

TEST_CASE("a killed service fails the outstanding call within 3 seconds") {
    Peer peer;
    Result<std::uint64_t> call = peer.channel->send(text("compute"));
    REQUIRE(call.has_value());
    // It has taken the request once it answers pings and nothing waits in its queue.
    REQUIRE(peer.channel->ping(Deadline::after_ms(10000)).has_value());
    const Clock::time_point start = Clock::now();
    peer.process.signal(SIGKILL);
    Result<Reply> reply = peer.channel->receive(*call, Deadline::after_ms(20000));
    const std::int64_t ms = ms_since(start);
    MESSAGE("noticed after " << ms << " ms");
    REQUIRE_FALSE(reply.has_value());
    CHECK(ms < 3000);
    CHECK(reply.error().code == ErrorCode::unavailable);
    CHECK(reply.error().message.find("echo (" + peer.endpoint + ")") != std::string::npos);
    CHECK(reply.error().message.find("Encode") != std::string::npos);
    CHECK(peer.channel->failed_service() == "echo");
}

TEST_CASE("a restarted service is met by a new hello, and never gets the old requests") {
    Sockets sockets;
    auto channel = make_channel(sockets.endpoint("s"));
    std::uint64_t first_instance = 0;
    {
        PeerProcess first(sockets.endpoint("s"));
        first_instance = greet(*channel).instance;
        first.signal(SIGKILL);
        REQUIRE(first.wait_for_exit(5000).has_value());
    }
    // While it is down, requests are refused and none is kept for later.
    Deadline deadline = Deadline::after_ms(3000);
    Result<std::uint64_t> refused = std::uint64_t{0};
    while (refused.has_value() && !deadline.expired()) refused = channel->send(text("compute"));
    REQUIRE_FALSE(refused.has_value());
    CHECK(refused.error().code == ErrorCode::unavailable);
    CHECK(file_exists(sockets.path("s")));  // killed: nobody removed it

    PeerProcess second(sockets.endpoint("s"));  // replaces the stale socket file
    CHECK(greet(*channel).instance != first_instance);
    Result<Reply> reply = channel->call(text("who"), {}, Deadline::after_ms(10000));
    REQUIRE_MESSAGE(reply.has_value(), (reply.has_value() ? "" : reply.error().message));
    CHECK(std::get<msg::Encoded>(reply->body).ids[0] == static_cast<std::uint32_t>(second.pid()));
}

TEST_CASE("a service that was frozen is noticed by its silence, and works again when thawed") {
    Peer peer;
    Channel::Options options = peer.channel->options();
    options.ping_ms = 50;
    options.liveness_ms = 400;
    auto channel = std::move(Channel::create(options)).value();
    greet(*channel);
    Result<std::uint64_t> call = channel->send(text("say nothing"));
    REQUIRE(call.has_value());
    peer.process.signal(SIGSTOP);
    const Clock::time_point start = Clock::now();
    Result<Reply> reply = channel->receive(*call, Deadline::after_ms(20000));
    REQUIRE_FALSE(reply.has_value());
    CHECK(reply.error().code == ErrorCode::unavailable);
    CHECK(reply.error().message.find("silent for 400 ms") != std::string::npos);
    CHECK(ms_since(start) < 3000);
    peer.process.signal(SIGCONT);
    greet(*channel);
    CHECK(channel->call(text("who"), {}, Deadline::after_ms(10000)).has_value());
}

TEST_CASE("a service that cannot start says why to its callers and in its log") {
    Sockets sockets;
    PeerProcess process(sockets.endpoint("s"), {"--mode", "fail"});
    auto channel = make_channel(sockets.endpoint("s"));
    Result<msg::Announcement> answer = channel->hello({}, Deadline::after_ms(5000));
    REQUIRE_FALSE(answer.has_value());
    CHECK(process.wait_for_exit(5000) == kExitModel);
    CHECK(process.log().find("shard 3 is damaged; copy it again") != std::string::npos);
    // A caller that came in time has the same sentence.
    CHECK(answer.error().code == ErrorCode::corrupt);
    CHECK(answer.error().message == "peer: shard 3 is damaged");
}

TEST_CASE("a second service on the path of a living one is refused, the first serves on") {
    Peer peer;
    PeerProcess second(peer.endpoint);
    CHECK(second.wait_for_exit(10000) == kExitResources);
    const std::string log = second.log();
    CHECK(log.find(peer.path + " is taken by another process") != std::string::npos);
    CHECK(peer.channel->call(text("who"), {}, Deadline::after_ms(10000)).has_value());
}

TEST_CASE("settings that cannot be meant end a service with code 2 and one sentence") {
    Sockets sockets;
    const std::vector<std::pair<std::vector<std::string>, std::string>> cases = {
        {{"--run-id", "xyz"}, "run_id"},
        {{"--name", "a/b"}, "name"},
        {{"--payload", "carrier-pigeon"}, "payload"},
        {{"--lifeline-fd", "777"}, "lifeline"},
        {{"--no-such-flag", "1"}, "no-such-flag"}};
    for (const auto& [arguments, word] : cases) {
        CAPTURE(word);
        PeerProcess process(sockets.endpoint("s"), arguments);
        CHECK(process.wait_for_exit(5000) == kExitUsage);
        CHECK(process.log().find(word) != std::string::npos);
    }
}
