#include "common/transport/channel.h"

#include <doctest/doctest.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <zmq.h>

#include <cerrno>
#include <utility>

#include "common/transport/zmq_socket.h"
#include "tests/support/fake_peer.h"
#include "tests/unit/common/transport/fixtures.h"

using namespace k3;
using namespace k3::transport;
using namespace k3::transport::test;

namespace {

const std::vector<std::uint32_t> kAbc = {97, 98, 99};

msg::Announcement ready(std::uint64_t instance) {
    msg::Announcement announcement;
    announcement.state = msg::State::ready;
    announcement.instance = instance;
    return announcement;
}

// Short enough to wait for, long enough for a peer on a busy machine.
constexpr std::int64_t kLivenessMs = 1000;
constexpr int kLongerMs = 1500;  // than that

/// Pings often. `liveness_ms` matters only to the cases that are about silence.
std::unique_ptr<Channel> quick_channel(const std::string& endpoint,
                                       std::int64_t liveness_ms = 20000) {
    Channel::Options options;
    options.endpoint = endpoint;
    options.peer = "fake";
    options.ping_ms = 20;
    options.liveness_ms = liveness_ms;
    return std::move(Channel::create(options)).value();
}

/// A thread that gets no CPU: a signal's handler that lasts.
void stall_thread(int) {
    const int saved = errno;
    ::poll(nullptr, 0, kLongerMs);
    errno = saved;
}

}  // namespace

TEST_CASE("a call is answered, and its frames come back as they were") {
    Sockets sockets;
    auto server = make_server(sockets.endpoint("s"));
    Worker worker(*server, echo);
    auto channel = make_channel(sockets.endpoint("s"));
    greet(*channel);
    for (std::size_t bytes : {0, 1, 7, 100, 8191, 8192, 300000}) {
        msg::Bytes frame(bytes);
        for (std::size_t i = 0; i < bytes; ++i) frame[i] = static_cast<std::byte>(i * 7);
        Result<Reply> reply = channel->call(text("abc"), {frame}, Deadline::after_ms(10000));
        REQUIRE(reply.has_value());
        CHECK(std::get<msg::Encoded>(reply->body).ids == kAbc);
        REQUIRE(reply->frames.size() == 1);
        CHECK(reply->frames[0] == frame);
    }
}

TEST_CASE("messages of every small size arrive, wherever ZeroMQ put them in memory") {
    auto server = make_server("tcp://127.0.0.1:*");
    Worker worker(*server, echo);
    auto channel = make_channel(server->endpoint());
    greet(*channel);
    for (std::size_t n = 0; n < 400; n += 3) {
        Result<Reply> reply =
            channel->call(text(std::string(n, 'x')), {}, Deadline::after_ms(10000));
        REQUIRE(reply.has_value());
        REQUIRE(std::get<msg::Encoded>(reply->body).ids.size() == n);
    }
}

TEST_CASE("a request before hello is refused") {
    Sockets sockets;
    auto server = make_server(sockets.endpoint("s"));
    auto channel = make_channel(sockets.endpoint("s"));
    Result<Reply> reply = channel->call(text("abc"), {}, Deadline::after_ms(10000));
    REQUIRE_FALSE(reply.has_value());
    CHECK(reply.error().code == ErrorCode::unavailable);
    CHECK(reply.error().message.find("greeted") != std::string::npos);
}

TEST_CASE("endpoints that nobody can be called at are refused") {
    for (const char* endpoint : {"", "ipc://", "tcp://127.0.0.1:*", "tcp://127.0.0.1:0", "x"}) {
        Channel::Options options;
        options.endpoint = endpoint;
        options.peer = "experts-1";
        Result<std::unique_ptr<Channel>> channel = Channel::create(options);
        REQUIRE_FALSE(channel.has_value());
        CHECK(channel.error().code == ErrorCode::invalid_argument);
        CHECK(channel.error().message.starts_with("experts-1"));
    }
}

TEST_CASE("a peer that does not exist is named with its endpoint at the deadline") {
    Sockets sockets;
    auto channel = make_channel(sockets.endpoint("nobody"));
    for (const Error& error : {channel->hello({}, Deadline::after_ms(100)).error(),
                               channel->ping(Deadline::after_ms(100)).error()}) {
        CHECK(error.code == ErrorCode::unavailable);
        CHECK(error.message.find("echo (" + sockets.endpoint("nobody") + ")") != std::string::npos);
    }
}

TEST_CASE("a channel may be made, and greet, before its peer exists") {
    Sockets sockets;
    auto channel = make_channel(sockets.endpoint("s"));
    std::unique_ptr<Server> server;
    std::thread later([&] {
        ::poll(nullptr, 0, 100);
        server = make_server(sockets.endpoint("s"));
    });
    greet(*channel);
    later.join();
}

TEST_CASE("calls are answered in any order, streams keep theirs") {
    Sockets sockets;
    auto server = make_server(sockets.endpoint("s"));
    auto channel = make_channel(sockets.endpoint("s"));
    greet(*channel);
    auto a = channel->send(text("a"));
    auto b = channel->send(text("b"));
    REQUIRE(a.has_value());
    REQUIRE(b.has_value());
    auto first = server->next(Deadline::after_ms(10000));
    auto second = server->next(Deadline::after_ms(10000));
    REQUIRE(second.has_value());
    for (std::uint32_t i = 0; i < 20; ++i) {
        second->responder.send(msg::Encoded{{i}});
        first->responder.send(msg::Encoded{{100 + i}});
    }
    for (std::uint32_t i = 0; i < 20; ++i) {
        auto reply = channel->receive(*a, Deadline::after_ms(10000), true);
        REQUIRE(reply.has_value());
        CHECK(std::get<msg::Encoded>(reply->body).ids[0] == 100 + i);
    }
    for (std::uint32_t i = 0; i < 20; ++i) {
        auto reply = channel->receive(*b, Deadline::after_ms(10000), i < 19);
        REQUIRE(reply.has_value());
        CHECK(std::get<msg::Encoded>(reply->body).ids[0] == i);
    }
    // b ended with its last reply, a is still outstanding.
    CHECK(channel->receive(*b, Deadline::after_ms(10)).error().code == ErrorCode::internal);
    CHECK(channel->receive(*a, Deadline::after_ms(10)).error().code ==
          ErrorCode::deadline_exceeded);
    channel->forget(*a);
    CHECK(channel->receive(*a, Deadline::after_ms(10)).error().code == ErrorCode::internal);
}

TEST_CASE("a call that met its deadline can be waited for again") {
    Sockets sockets;
    auto server = make_server(sockets.endpoint("s"));
    auto channel = make_channel(sockets.endpoint("s"));
    greet(*channel);
    auto call = channel->send(text("slow"));
    REQUIRE(call.has_value());
    Result<Reply> early = channel->receive(*call, Deadline::after_ms(30));
    REQUIRE_FALSE(early.has_value());
    CHECK(early.error().code == ErrorCode::deadline_exceeded);
    CHECK(early.error().message.find("Encode") != std::string::npos);
    auto request = server->next(Deadline::after_ms(10000));
    REQUIRE(request.has_value());
    request->responder.send(msg::Encoded{{1}});
    CHECK(channel->receive(*call, Deadline::after_ms(10000)).has_value());
}

TEST_CASE("a failure comes back as its error, with the service named once") {
    Sockets sockets;
    auto server = make_server(sockets.endpoint("s"));
    auto channel = make_channel(sockets.endpoint("s"));
    greet(*channel);
    CHECK(channel->failed_service().empty());
    auto call = channel->send(text("a"));
    auto request = server->next(Deadline::after_ms(10000));
    REQUIRE(request.has_value());
    const Error error{ErrorCode::corrupt, "layer 3, expert 7: scale byte 255", "copy it again"};
    SUBCASE("its own") {
        request->responder.send_error(error);
        Result<Reply> reply = channel->receive(*call, Deadline::after_ms(10000), true);
        REQUIRE_FALSE(reply.has_value());
        CHECK(reply.error() == Error{error.code, "echo: " + error.message, error.remedy});
        CHECK(channel->failed_service() == "echo");
    }
    SUBCASE("passed on from another") {
        Error named = error;
        named.message = "experts-1: " + named.message;
        request->responder.send_failure({named, "experts-1"});
        Result<Reply> reply = channel->receive(*call, Deadline::after_ms(10000), true);
        REQUIRE_FALSE(reply.has_value());
        CHECK(reply.error() == named);
        CHECK(channel->failed_service() == "experts-1");
    }
    // A failure is the last reply, also of a stream.
    CHECK(channel->receive(*call, Deadline::after_ms(10)).error().code == ErrorCode::internal);
}

TEST_CASE("a post arrives and is not answered") {
    Sockets sockets;
    auto server = make_server(sockets.endpoint("s"));
    auto channel = make_channel(sockets.endpoint("s"));
    channel->post(msg::Prefetch{9, {1}, {0}});  // before hello: lost, silently
    greet(*channel);
    channel->post(msg::Prefetch{4, {1, 2}, {0, 1}});
    auto request = server->next(Deadline::after_ms(10000));
    REQUIRE(request.has_value());
    CHECK(std::get<msg::Prefetch>(request->envelope.body).layer == 4);
    CHECK_FALSE(request->responder.wants_reply());
}

TEST_CASE("what was posted just before the channel ends still arrives") {
    Sockets sockets;
    auto server = make_server(sockets.endpoint("s"));
    auto channel = make_channel(sockets.endpoint("s"));
    greet(*channel);
    channel->post(msg::Cancel{5});
    channel.reset();
    auto request = server->next(Deadline::after_ms(10000));
    REQUIRE(request.has_value());
    CHECK(std::get<msg::Cancel>(request->envelope.body).request == 5);
}

TEST_CASE(
    "a server that ends fails the outstanding calls, and the next hello meets its successor") {
    Sockets sockets;
    auto server = make_server(sockets.endpoint("s"));
    auto channel = make_channel(sockets.endpoint("s"));
    const std::uint64_t instance = greet(*channel).instance;
    auto call = channel->send(text("a"));
    auto taken = server->next(Deadline::after_ms(10000));
    REQUIRE(taken.has_value());
    server.reset();
    Result<Reply> reply = channel->receive(*call, Deadline::after_ms(10000));
    REQUIRE_FALSE(reply.has_value());
    CHECK(reply.error().code == ErrorCode::unavailable);
    CHECK(reply.error().message.find("closed the connection") != std::string::npos);
    Result<std::uint64_t> next = channel->send(text("b"));
    REQUIRE_FALSE(next.has_value());
    CHECK(next.error().code == ErrorCode::unavailable);
    server = make_server(sockets.endpoint("s"));
    CHECK(greet(*channel).instance != instance);
    CHECK_FALSE(server->try_next().has_value());  // nothing of the past arrives
}

TEST_CASE("a pong of another instance ends the outstanding calls") {
    Sockets sockets;
    k3::test::FakePeer peer(
        sockets.endpoint("s"), [](const msg::Envelope& e) -> std::optional<msg::Bytes> {
            if (std::holds_alternative<msg::Hello>(e.body))
                return msg::encode({0, e.call_id, ready(1)});
            if (std::holds_alternative<msg::Ping>(e.body))
                return msg::encode({0, e.call_id, msg::Pong{2, msg::State::ready, 1000, ""}});
            return std::nullopt;
        });
    auto channel = quick_channel(sockets.endpoint("s"));
    greet(*channel);
    auto call = channel->send(text("a"));
    Result<Reply> reply = channel->receive(*call, Deadline::after_ms(10000));
    REQUIRE_FALSE(reply.has_value());
    CHECK(reply.error().code == ErrorCode::unavailable);
    CHECK(reply.error().message.find("was restarted while Encode was outstanding") !=
          std::string::npos);
}

TEST_CASE("silence ends the outstanding calls, an answered ping does not") {
    Sockets sockets;
    std::atomic<bool> alive{true};
    k3::test::FakePeer peer(
        sockets.endpoint("s"), [&](const msg::Envelope& e) -> std::optional<msg::Bytes> {
            if (std::holds_alternative<msg::Hello>(e.body))
                return msg::encode({0, e.call_id, ready(1)});
            if (std::holds_alternative<msg::Ping>(e.body) && alive.load())
                return msg::encode({0, e.call_id, msg::Pong{1, msg::State::ready, 1000, ""}});
            return std::nullopt;
        });
    auto channel = quick_channel(sockets.endpoint("s"), kLivenessMs);
    greet(*channel);
    auto call = channel->send(text("a"));
    // Far longer than liveness_ms: it computes, and pongs say so.
    CHECK(channel->receive(*call, Deadline::after_ms(2 * kLivenessMs)).error().code ==
          ErrorCode::deadline_exceeded);
    alive.store(false);
    Result<Reply> reply = channel->receive(*call, Deadline::after_ms(20000));
    REQUIRE_FALSE(reply.has_value());
    CHECK(reply.error().message.find("silent for 1000 ms") != std::string::npos);
}

TEST_CASE("a time without calls is no silence of the peer") {
    Sockets sockets;
    auto server = make_server(sockets.endpoint("s"));
    auto channel = quick_channel(sockets.endpoint("s"), kLivenessMs);
    greet(*channel);
    ::poll(nullptr, 0, kLongerMs);
    auto call = channel->send(text("a"));
    // The peer computes for a moment, so the caller looks at the silence before there is an answer.
    CHECK(channel->receive(*call, Deadline::after_ms(50)).error().code ==
          ErrorCode::deadline_exceeded);
    auto request = server->next(Deadline::after_ms(10000));
    REQUIRE(request.has_value());
    request->responder.send(msg::Encoded{{7}});
    CHECK(channel->receive(*call, Deadline::after_ms(10000)).has_value());
}

TEST_CASE("the caller's own pause is no silence of the peer") {
    Sockets sockets;
    auto server = make_server(sockets.endpoint("s"));
    auto channel = quick_channel(sockets.endpoint("s"), kLivenessMs);
    greet(*channel);
    auto call = channel->send(text("a"));
    ::poll(nullptr, 0, kLongerMs);  // without a ping
    auto request = server->next(Deadline::after_ms(10000));
    REQUIRE(request.has_value());
    std::thread later([&] {
        ::poll(nullptr, 0, 100);
        request->responder.send(msg::Encoded{{1}});
    });
    CHECK(channel->receive(*call, Deadline::after_ms(10000)).has_value());
    later.join();
}

TEST_CASE("a caller that got no CPU while it waited blames nobody for silence") {
    Sockets sockets;
    std::atomic<bool> stalled{false};
    k3::test::FakePeer peer(
        sockets.endpoint("s"), [&](const msg::Envelope& e) -> std::optional<msg::Bytes> {
            if (std::holds_alternative<msg::Hello>(e.body))
                return msg::encode({0, e.call_id, ready(1)});
            // As busy a machine leaves the peer behind as well: no pong comes during the stall.
            if (std::holds_alternative<msg::Ping>(e.body) && !stalled.load())
                return msg::encode({0, e.call_id, msg::Pong{1, msg::State::ready, 1000, ""}});
            return std::nullopt;
        });
    auto channel = quick_channel(sockets.endpoint("s"), kLivenessMs);
    greet(*channel);
    auto call = channel->send(text("a"));
    struct sigaction action {};
    struct sigaction before {};
    action.sa_handler = stall_thread;
    REQUIRE(::sigaction(SIGUSR1, &action, &before) == 0);
    const pthread_t caller = ::pthread_self();
    std::thread machine([&] {
        ::poll(nullptr, 0, 100);  // until the call is being waited for
        stalled.store(true);
        ::poll(nullptr, 0, 100);  // until the pongs on their way have arrived
        ::pthread_kill(caller, SIGUSR1);
        ::poll(nullptr, 0, static_cast<int>(kLivenessMs));  // the stall lasts longer
        stalled.store(false);
    });
    CHECK(channel->receive(*call, Deadline::after_ms(3 * kLivenessMs)).error().code ==
          ErrorCode::deadline_exceeded);
    machine.join();
    ::sigaction(SIGUSR1, &before, nullptr);
}

TEST_CASE("a peer of another protocol version is refused with both numbers") {
    Sockets sockets;
    k3::test::FakePeer peer(sockets.endpoint("s"),
                            [](const msg::Envelope& e) -> std::optional<msg::Bytes> {
                                return k3::test::of_another_version({0, e.call_id, ready(1)});
                            });
    auto channel = quick_channel(sockets.endpoint("s"));
    Result<msg::Announcement> answer = channel->hello({}, Deadline::after_ms(10000));
    REQUIRE_FALSE(answer.has_value());
    CHECK(answer.error().code == ErrorCode::incompatible);
    CHECK(answer.error().message.find("fake (") != std::string::npos);
    CHECK(answer.error().message.find("version 2") != std::string::npos);
    CHECK(answer.error().message.find("version 1") != std::string::npos);
}

TEST_CASE("answers that are garbage or of the wrong kind are errors of that call alone") {
    Sockets sockets;
    k3::test::FakePeer peer(
        sockets.endpoint("s"), [](const msg::Envelope& e) -> std::optional<msg::Bytes> {
            if (std::holds_alternative<msg::Hello>(e.body))
                return msg::encode({0, e.call_id, ready(1)});
            if (const auto* encode = std::get_if<msg::Encode>(&e.body);
                encode && encode->text == "x")
                return msg::Bytes(64, std::byte{0xFF});
            if (std::holds_alternative<msg::Encode>(e.body))
                return msg::encode({0, e.call_id, msg::Done{}});
            return msg::encode({0, e.call_id, msg::Pong{1, msg::State::ready, 1000, ""}});
        });
    auto channel = quick_channel(sockets.endpoint("s"));
    greet(*channel);
    CHECK(channel->call(text("x"), {}, Deadline::after_ms(100)).error().code ==
          ErrorCode::deadline_exceeded);
    auto wrong =
        expect<msg::Encoded>(channel->call(text("y"), {}, Deadline::after_ms(10000)), "fake");
    REQUIRE_FALSE(wrong.has_value());
    CHECK(wrong.error().code == ErrorCode::internal);
    CHECK(wrong.error().message.find("Done") != std::string::npos);
    CHECK(channel->ping(Deadline::after_ms(10000)).has_value());
}
