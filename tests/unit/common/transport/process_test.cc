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

// For what must happen and is not promised by the clock; a busy machine under a sanitizer is slow.
constexpr std::int64_t kPatienceMs = 20000;

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
    Result<Reply> done = peer.channel->call(msg::Shutdown{}, {}, Deadline::after_ms(kPatienceMs));
    REQUIRE(done.has_value());
    CHECK(std::holds_alternative<msg::Done>(done->body));
    CHECK(peer.process.wait_for_exit(kPatienceMs) == 0);
    peer.check_nothing_left();
}

TEST_CASE("SIGTERM and SIGINT end a waiting service at once, with code 0") {
    for (int number : {SIGTERM, SIGINT}) {
        Peer peer;
        peer.process.signal(number);
        CHECK(peer.process.wait_for_exit(kPatienceMs) == 0);  // not 128 + n: nobody forced it
        peer.check_nothing_left();
    }
}

TEST_CASE("a service that computes is ended by force 3 seconds after the signal") {
    Peer peer({"--mode", "compute"});
    const Clock::time_point start = Clock::now();
    peer.process.signal(SIGTERM);
    CHECK(peer.process.wait_for_exit(kPatienceMs) == 128 + SIGTERM);
    CHECK(ms_since(start) >= 2500);
    peer.check_nothing_left();
}

TEST_CASE("a second signal ends a service that computes at once") {
    Peer peer({"--mode", "compute"});
    peer.process.signal(SIGINT);
    auto pong = peer.channel->ping(Deadline::after_ms(kPatienceMs));
    while (pong.has_value() && pong->state != msg::State::stopping)
        pong = peer.channel->ping(Deadline::after_ms(kPatienceMs));
    REQUIRE(pong.has_value());
    peer.process.signal(SIGTERM);
    // The end that the first one prepares after 3 s would have its number.
    CHECK(peer.process.wait_for_exit(kPatienceMs) == 128 + SIGTERM);
    peer.check_nothing_left();
}

TEST_CASE("the end of the lifeline ends a waiting service at once") {
    Peer peer;
    peer.process.cut_lifeline();
    CHECK(peer.process.wait_for_exit(kPatienceMs) == 0);
    peer.check_nothing_left();
}

TEST_CASE("the end of the lifeline ends a service that computes by force") {
    Peer peer({"--mode", "compute"});
    peer.process.cut_lifeline();
    CHECK(peer.process.wait_for_exit(kPatienceMs) == kExitFailed);
    peer.check_nothing_left();
}

TEST_CASE("a killed service fails the outstanding call as soon as its connection ends") {
    Peer peer;
    Result<std::uint64_t> call = peer.channel->send(text("compute"));
    REQUIRE(call.has_value());
    // It has the request when it answers the ping that was sent after it.
    REQUIRE(peer.channel->ping(Deadline::after_ms(kPatienceMs)).has_value());
    const Clock::time_point start = Clock::now();
    peer.process.signal(SIGKILL);
    Result<Reply> reply = peer.channel->receive(*call, Deadline::after_ms(kPatienceMs));
    MESSAGE("noticed after " << ms_since(start) << " ms");
    REQUIRE_FALSE(reply.has_value());
    CHECK(reply.error().code == ErrorCode::unavailable);
    CHECK(reply.error().message ==
          "echo (" + peer.endpoint + ") has closed the connection while Encode was outstanding");
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
        REQUIRE(first.wait_for_exit(kPatienceMs).has_value());
    }
    // While it is down, requests are refused and none is kept for later.
    Deadline deadline = Deadline::after_ms(kPatienceMs);
    Result<std::uint64_t> refused = std::uint64_t{0};
    while (refused.has_value() && !deadline.expired()) refused = channel->send(text("compute"));
    REQUIRE_FALSE(refused.has_value());
    CHECK(refused.error().code == ErrorCode::unavailable);
    CHECK(file_exists(sockets.path("s")));  // killed: nobody removed it

    PeerProcess second(sockets.endpoint("s"));  // replaces the stale socket file
    CHECK(greet(*channel).instance != first_instance);
    Result<Reply> reply = channel->call(text("who"), {}, Deadline::after_ms(kPatienceMs));
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
    Result<Reply> reply = channel->receive(*call, Deadline::after_ms(kPatienceMs));
    REQUIRE_FALSE(reply.has_value());
    CHECK(reply.error().code == ErrorCode::unavailable);
    CHECK(reply.error().message.find("silent for 400 ms") != std::string::npos);
    peer.process.signal(SIGCONT);
    // On a busy machine it may seem frozen again for the 400 ms that this channel grants.
    Deadline deadline = Deadline::after_ms(kPatienceMs);
    bool works = false;
    while (!works && !deadline.expired()) {
        greet(*channel);
        works = channel->call(text("who"), {}, deadline).has_value();
    }
    CHECK(works);
}

TEST_CASE("a service that cannot start says why to its callers and in its log") {
    Sockets sockets;
    auto channel = make_channel(sockets.endpoint("s"));
    std::optional<Error> told;
    // It tells for a fraction of a second: on a busy machine a caller may come too late for one.
    for (int i = 0; i < 20 && (!told || told->code == ErrorCode::unavailable); ++i) {
        PeerProcess process(sockets.endpoint("s"), {"--mode", "fail"});
        Result<msg::Announcement> answer = channel->hello({}, Deadline::after_ms(3000));
        REQUIRE_FALSE(answer.has_value());
        told = answer.error();
        CHECK(process.wait_for_exit(kPatienceMs) == kExitModel);
        CHECK(process.log().find("shard 3 is damaged; copy it again") != std::string::npos);
    }
    CHECK(told->code == ErrorCode::corrupt);
    CHECK(told->message == "peer: shard 3 is damaged");
}

TEST_CASE("a second service on the path of a living one is refused, the first serves on") {
    Peer peer;
    PeerProcess second(peer.endpoint);
    CHECK(second.wait_for_exit(kPatienceMs) == kExitResources);
    const std::string log = second.log();
    CHECK(log.find(peer.path + " is taken by another process") != std::string::npos);
    CHECK(peer.channel->call(text("who"), {}, Deadline::after_ms(kPatienceMs)).has_value());
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
        const auto& seen = word;  // clang 14 lets no lambda take the binding itself
        CAPTURE(seen);
        PeerProcess process(sockets.endpoint("s"), arguments);
        CHECK(process.wait_for_exit(kPatienceMs) == kExitUsage);
        CHECK(process.log().find(word) != std::string::npos);
    }
}
