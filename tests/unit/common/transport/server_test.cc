#include "common/transport/server.h"

#include <doctest/doctest.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>
#include <zmq.h>

#include <algorithm>
#include <fstream>
#include <map>

#include "common/base/fd.h"
#include "common/base/settings.h"
#include "common/transport/arena.h"
#include "common/transport/zmq_socket.h"
#include "tests/unit/common/transport/fixtures.h"

using namespace k3;
using namespace k3::transport;
using namespace k3::transport::test;

namespace {

Error refusal(const std::string& endpoint) {
    Result<std::unique_ptr<Server>> server = Server::create(server_options(endpoint));
    REQUIRE_FALSE(server.has_value());
    return server.error();
}

/// A client that can send anything.
class RawClient {
  public:
    explicit RawClient(const std::string& endpoint) : socket_(context_, ZMQ_DEALER) {
        REQUIRE(socket_.connect(endpoint) == 0);
    }
    void send(msg::Bytes first, std::vector<msg::Bytes> more = {}) {
        Deadline deadline = Deadline::after_ms(10000);
        while (socket_.send({}, first, more) != SendOutcome::sent && !deadline.expired())
            ::poll(nullptr, 0, 1);
    }
    msg::Envelope receive() {
        zmq_pollitem_t item{socket_.get(), 0, ZMQ_POLLIN, 0};
        REQUIRE(::zmq_poll(&item, 1, 10000) == 1);
        auto frames = socket_.receive();
        REQUIRE(frames.has_value());
        std::uint64_t hint = 0;
        Result<msg::Envelope> envelope = msg::decode((*frames)[0], hint);
        REQUIRE(envelope.has_value());
        return std::move(envelope).value();
    }
    Error receive_error() {
        msg::Envelope envelope = receive();
        REQUIRE(std::holds_alternative<msg::Failure>(envelope.body));
        call_id = envelope.call_id;
        return std::get<msg::Failure>(envelope.body).error;
    }
    std::uint64_t call_id = 0;  // of the last error

  private:
    ZmqContext context_;
    ZmqSocket socket_;
};

msg::Bytes bytes_of(const std::string& text) {
    const auto* data = reinterpret_cast<const std::byte*>(text.data());
    return {data, data + text.size()};
}

bool readable(int fd) {
    pollfd item{fd, POLLIN, 0};
    return ::poll(&item, 1, 0) == 1;
}

bool readable_soon(int fd) {
    pollfd item{fd, POLLIN, 0};
    return ::poll(&item, 1, 10000) == 1;
}

}  // namespace

TEST_CASE("endpoints that cannot be meant are refused with the legal forms") {
    for (const char* endpoint :
         {"", "trunk.sock", "http://x", "ipc://", "ipc://*", "ipc://@abstract", "tcp://127.0.0.1",
          "tcp://:5555", "tcp://127.0.0.1:port", "tcp://127.0.0.1:65536", "tcp://127.0.0.1:-1",
          "tcp://192.0.2.77:0"}) {
        CAPTURE(endpoint);
        Error error = refusal(endpoint);
        CHECK(error.code == ErrorCode::invalid_argument);
        CHECK(error.message.find(endpoint) != std::string::npos);
    }
}

TEST_CASE("a socket path over 107 bytes is refused with both numbers") {
    Sockets sockets;
    const std::string longest = sockets.path("") + std::string(107 - sockets.path("").size(), 'x');
    CHECK(Server::create(server_options("ipc://" + longest)).has_value());
    Error error = refusal("ipc://" + longest + "x");
    CHECK(error.code == ErrorCode::invalid_argument);
    CHECK(error.message.find("108 bytes") != std::string::npos);
    CHECK(error.message.find("107") != std::string::npos);
}

TEST_CASE("a directory that does not exist is named") {
    Sockets sockets;
    Error error = refusal("ipc://" + sockets.path("missing") + "/s");
    CHECK(error.code == ErrorCode::io);
    CHECK(error.message.find(sockets.path("missing")) != std::string::npos);
    CHECK(error.message.find("does not exist") != std::string::npos);
}

TEST_CASE("a file that is no socket is left alone") {
    Sockets sockets;
    std::ofstream(sockets.path("s")) << "precious";
    Error error = refusal(sockets.endpoint("s"));
    CHECK(error.code == ErrorCode::resource_exhausted);
    CHECK(error.message.find("not a socket") != std::string::npos);
    CHECK(k3::test::read_file(sockets.path("s")) == "precious");
}

TEST_CASE("a taken path is refused and a stale socket file replaced") {
    Sockets sockets;
    auto first = make_server(sockets.endpoint("s"));
    Error error = refusal(sockets.endpoint("s"));
    CHECK(error.code == ErrorCode::resource_exhausted);
    CHECK(error.message.find(sockets.path("s") + " is taken") != std::string::npos);
    auto channel = make_channel(sockets.endpoint("s"));
    greet(*channel);
    first.reset();
    CHECK(::access(sockets.path("s").c_str(), F_OK) != 0);

    // What a killed process leaves: a bound file that nobody listens on.
    sockaddr_un address{};
    address.sun_family = AF_UNIX;
    sockets.path("s").copy(address.sun_path, sizeof(address.sun_path) - 1);
    Fd dead(::socket(AF_UNIX, SOCK_STREAM, 0));
    REQUIRE(::bind(dead.get(), reinterpret_cast<sockaddr*>(&address), sizeof(address)) == 0);
    dead.reset();
    auto second = make_server(sockets.endpoint("s"));
    greet(*channel);
    struct stat info {};
    REQUIRE(::stat(sockets.path("s").c_str(), &info) == 0);
    CHECK((info.st_mode & 0777) == 0600);
}

TEST_CASE("of many servers that start at once on one stale path exactly one wins") {
    Sockets sockets;
    std::vector<std::thread> threads;
    std::vector<std::unique_ptr<Server>> servers(8);
    for (auto& slot : servers)
        threads.emplace_back([&sockets, &slot] {
            auto server = Server::create(server_options(sockets.endpoint("s")));
            if (server.has_value()) slot = std::move(server).value();
        });
    for (std::thread& thread : threads) thread.join();
    CHECK(std::count_if(servers.begin(), servers.end(), [](auto& s) { return s != nullptr; }) == 1);
}

TEST_CASE("a taken tcp port is refused with the address") {
    auto server = make_server("tcp://127.0.0.1:*");
    REQUIRE(server->endpoint() != "tcp://127.0.0.1:*");
    auto channel = make_channel(server->endpoint());
    greet(*channel);
    Error error = refusal(server->endpoint());
    CHECK(error.code == ErrorCode::resource_exhausted);
    CHECK(error.message.find(server->endpoint() + " is taken") != std::string::npos);
}

TEST_CASE("an address that other boxes can reach needs keys or insecure") {
    Server::Options options = server_options("tcp://0.0.0.0:*");
    Error error = refusal(options.endpoint);
    CHECK(error.code == ErrorCode::invalid_argument);
    CHECK(error.remedy.find("insecure") != std::string::npos);
    options.insecure = true;
    CHECK(Server::create(options).has_value());
    options.endpoint = "tcp://192.0.2.77:5999";  // no address of this box (RFC 5737)
    Result<std::unique_ptr<Server>> elsewhere = Server::create(options);
    REQUIRE_FALSE(elsewhere.has_value());
    CHECK(elsewhere.error().message.find("does not have") != std::string::npos);
}

TEST_CASE("a lifeline that is not open is refused") {
    Sockets sockets;
    Server::Options options = server_options(sockets.endpoint("s"));
    options.lifeline_fd = 777;
    Result<std::unique_ptr<Server>> server = Server::create(options);
    REQUIRE_FALSE(server.has_value());
    CHECK(server.error().message.find("777") != std::string::npos);
}

TEST_CASE("while loading, requests are refused with the progress and control is answered") {
    Sockets sockets;
    auto server = make_server(sockets.endpoint("s"), false);
    server->set_progress(420, "layer 3");
    auto channel = make_channel(sockets.endpoint("s"));
    Result<msg::Pong> pong = channel->ping(Deadline::after_ms(10000));
    REQUIRE(pong.has_value());
    CHECK(pong->state == msg::State::loading);
    CHECK(pong->progress_permille == 420);
    CHECK(pong->detail == "layer 3");
    CHECK(pong->instance == server->instance());

    RawClient client(sockets.endpoint("s"));
    client.send(msg::encode({0, 77, text("abc")}));
    Error error = client.receive_error();
    CHECK(client.call_id == 77);
    CHECK(error.code == ErrorCode::unavailable);
    CHECK(error.message == "echo is still loading (42 %: layer 3)");

    // In the time that a busy machine needs to ask and to hear.
    Result<msg::Announcement> early = channel->hello({}, Deadline::after_ms(300));
    for (int ms = 600; ms < 20000; ms *= 2) {
        REQUIRE_FALSE(early.has_value());
        if (early.error().message.find("42 %") != std::string::npos) break;
        early = channel->hello({}, Deadline::after_ms(ms));
    }
    CHECK(early.error().code == ErrorCode::unavailable);
    CHECK(early.error().message.find("42 %: layer 3") != std::string::npos);
    CHECK(early.error().message.find(sockets.endpoint("s")) != std::string::npos);
}

TEST_CASE("hello waits until the service is ready and returns what it announced") {
    Sockets sockets;
    auto server = make_server(sockets.endpoint("s"), false);
    std::thread loader([&] {
        ::poll(nullptr, 0, 120);
        msg::Announcement announcement;
        announcement.fingerprint = "00ff";
        announcement.facts = msg::SamplerFacts{7};
        server->set_ready(announcement);
    });
    auto channel = make_channel(sockets.endpoint("s"));
    msg::Announcement answer = greet(*channel);
    loader.join();
    CHECK(answer.state == msg::State::ready);
    CHECK(answer.name == "echo");
    CHECK(answer.kind == msg::ServiceKind::tokenizer);
    CHECK(answer.version == version());
    CHECK(answer.fingerprint == "00ff");
    CHECK(answer.instance == server->instance());
    CHECK(std::get<msg::SamplerFacts>(answer.facts).max_rows == 7);
}

TEST_CASE("hello tells which of the caller's segments can be read") {
    Sockets sockets;
    auto server = make_server(sockets.endpoint("s"));
    auto arena = Arena::create({segment_name(0x7E57, "probe"), 4096, 1});
    REQUIRE(arena.has_value());
    msg::SegmentProbe wrong = (*arena)->probe();
    wrong.nonce += 1;
    auto channel = make_channel(sockets.endpoint("s"));
    auto answer = channel->hello({(*arena)->probe(), wrong, {"/k3-0-nobody-1", 1}, {"../x", 1}},
                                 Deadline::after_ms(10000));
    REQUIRE(answer.has_value());
    CHECK(answer->probes == std::vector<bool>{true, false, false, false});
}

TEST_CASE("a failed service answers hello and requests with its error") {
    Sockets sockets;
    auto server = make_server(sockets.endpoint("s"), false);
    server->set_failed({ErrorCode::corrupt, "shard 3 is damaged", "copy it again"});
    auto channel = make_channel(sockets.endpoint("s"));
    Result<msg::Announcement> answer = channel->hello({}, Deadline::after_ms(10000));
    REQUIRE_FALSE(answer.has_value());
    CHECK(answer.error().code == ErrorCode::corrupt);
    CHECK(answer.error().message == "echo: shard 3 is damaged");
    CHECK(answer.error().remedy == "copy it again");
    CHECK(channel->ping(Deadline::after_ms(10000))->state == msg::State::failed);
}

TEST_CASE("a full queue is refused with its numbers, and what waits is kept") {
    Sockets sockets;
    Server::Options options = server_options(sockets.endpoint("s"));
    options.max_queue = 2;
    auto server = std::move(Server::create(options)).value();
    server->set_ready({});
    RawClient client(sockets.endpoint("s"));
    for (std::uint64_t id = 1; id <= 3; ++id) client.send(msg::encode({0, id, text("abc")}));
    Error error = client.receive_error();
    CHECK(client.call_id == 3);
    CHECK(error.code == ErrorCode::resource_exhausted);
    CHECK(error.message == "echo has 2 requests waiting, its limit is 2");
    for (std::uint64_t id = 1; id <= 2; ++id) {
        auto request = server->next(Deadline::after_ms(10000));
        REQUIRE(request.has_value());
        CHECK(request->envelope.call_id == id);
    }
    CHECK_FALSE(server->try_next().has_value());
}

TEST_CASE("pings are answered while the service computes") {
    Sockets sockets;
    auto server = make_server(sockets.endpoint("s"));
    auto channel = make_channel(sockets.endpoint("s"));
    greet(*channel);
    REQUIRE(channel->send(text("long")).has_value());  // nobody takes it
    CHECK(channel->ping(Deadline::after_ms(10000))->state == msg::State::ready);
}

TEST_CASE("statistics count requests, refusals and garbage, and hold the service's own") {
    Sockets sockets;
    auto server = make_server(sockets.endpoint("s"));
    server->set_statistics([] { return std::vector<msg::Counter>{{"expert_cache_hits", 5}}; });
    Worker worker(*server, echo);
    auto channel = make_channel(sockets.endpoint("s"));
    greet(*channel);
    REQUIRE(channel->call(text("abc"), {}, Deadline::after_ms(10000)).has_value());
    RawClient client(sockets.endpoint("s"));
    client.send(bytes_of("garbage"));
    client.receive_error();
    auto reply = expect<msg::Statistics>(
        channel->call(msg::GetStatistics{}, {}, Deadline::after_ms(10000)), "echo");
    REQUIRE(reply.has_value());
    std::map<std::string, std::uint64_t> counters;
    for (const msg::Counter& counter : reply->counters) counters[counter.name] = counter.value;
    CHECK(counters["expert_cache_hits"] == 5);
    CHECK(counters["transport_requests"] == 1);
    CHECK(counters["transport_malformed_messages"] == 1);
    CHECK(counters["transport_refused_requests"] == 0);
    CHECK(reply->resident_bytes > 100000);
}

TEST_CASE("garbage is answered with an error, with the call id where it was readable") {
    Sockets sockets;
    auto server = make_server(sockets.endpoint("s"));
    RawClient client(sockets.endpoint("s"));
    const msg::Bytes good = msg::encode({0, 99, text("abc")});
    SUBCASE("text") { client.send(bytes_of("GET / HTTP/1.1\r\n\r\n")); }
    SUBCASE("an empty frame") { client.send({}); }
    SUBCASE("zeros, which would read as an all-default message") { client.send(msg::Bytes(64)); }
    SUBCASE("a truncated message") { client.send(msg::Bytes(good.begin(), good.begin() + 24)); }
    SUBCASE("an empty delimiter first, as a REQ socket sends it") { client.send({}, {good}); }
    Error error = client.receive_error();
    CHECK(error.code == ErrorCode::invalid_argument);
    CHECK(client.call_id == 0);
    client.send(msg::encode({0, 100, msg::Ping{}}));
    CHECK(std::holds_alternative<msg::Pong>(client.receive().body));
}

TEST_CASE("another protocol version is refused with both numbers and the call id") {
    Sockets sockets;
    auto server = make_server(sockets.endpoint("s"));
    RawClient client(sockets.endpoint("s"));
    msg::Bytes other = msg::encode({0, 99, text("abc")});
    REQUIRE(other[16] == std::byte{msg::kProtocolVersion});
    other[16] = std::byte{9};
    client.send(other);
    Error error = client.receive_error();
    CHECK(client.call_id == 99);
    CHECK(error.code == ErrorCode::incompatible);
    CHECK(error.message.find("version 9") != std::string::npos);
    CHECK(error.message.find("version 1") != std::string::npos);
}

TEST_CASE("replies are not requests") {
    Sockets sockets;
    auto server = make_server(sockets.endpoint("s"));
    RawClient client(sockets.endpoint("s"));
    for (const msg::Body& body :
         {msg::Body(msg::Pong{}), msg::Body(msg::Done{}), msg::Body(msg::Announcement{}),
          msg::Body(msg::Failure{}), msg::Body(msg::Statistics{})}) {
        client.send(msg::encode({0, 5, body}));
        CHECK(client.receive_error().code == ErrorCode::invalid_argument);
    }
    CHECK_FALSE(server->try_next().has_value());
}

TEST_CASE("a message of too many frames is refused") {
    Sockets sockets;
    auto server = make_server(sockets.endpoint("s"));
    RawClient client(sockets.endpoint("s"));
    client.send(msg::encode({0, 5, text("abc")}), std::vector<msg::Bytes>(5, msg::Bytes(1)));
    Error error = client.receive_error();
    CHECK(error.message.find("6 frames, the limit is 5") != std::string::npos);
    CHECK(client.call_id == 5);
}

TEST_CASE("a message over the size limit loses its connection, not the server") {
    Sockets sockets;
    Server::Options options = server_options(sockets.endpoint("s"));
    options.max_message_bytes = 10000;
    auto server = std::move(Server::create(options)).value();
    server->set_ready({});
    auto channel = make_channel(sockets.endpoint("s"));
    greet(*channel);
    Result<Reply> reply =
        channel->call(text("abc"), {msg::Bytes(20000)}, Deadline::after_ms(10000));
    REQUIRE_FALSE(reply.has_value());
    CHECK(reply.error().code == ErrorCode::unavailable);
    greet(*channel);
}

TEST_CASE("shutdown is answered, refuses what waits, and ends next()") {
    Sockets sockets;
    auto server = make_server(sockets.endpoint("s"));
    RawClient client(sockets.endpoint("s"));
    client.send(msg::encode({0, 1, text("waits")}));
    client.send(msg::encode({0, 2, msg::Shutdown{}}));
    bool done = false;
    for (int i = 0; i < 2; ++i) {
        msg::Envelope reply = client.receive();
        if (reply.call_id == 2) {
            done = std::holds_alternative<msg::Done>(reply.body);
            continue;
        }
        CHECK(std::get<msg::Failure>(reply.body).error.message == "echo is stopping");
    }
    CHECK(done);
    CHECK(server->stopping());
    CHECK(readable(server->wait_fd()));
    CHECK_FALSE(server->next(Deadline::after_ms(10000)).has_value());
    client.send(msg::encode({0, 3, text("late")}));
    CHECK(client.receive_error().code == ErrorCode::unavailable);
}

TEST_CASE("next returns nothing at its deadline, and wait_fd is readable while requests wait") {
    Sockets sockets;
    auto server = make_server(sockets.endpoint("s"));
    CHECK_FALSE(server->next(Deadline::after_ms(20)).has_value());
    CHECK_FALSE(readable(server->wait_fd()));
    RawClient client(sockets.endpoint("s"));
    client.send(msg::encode({0, 1, text("a")}));
    client.send(msg::encode({0, 2, text("b")}));
    REQUIRE(readable_soon(server->wait_fd()));
    REQUIRE(server->next(Deadline::after_ms(10000)).has_value());
    REQUIRE(server->next(Deadline::after_ms(10000)).has_value());
    CHECK_FALSE(readable(server->wait_fd()));
    server->request_stop();
    CHECK(readable(server->wait_fd()));
}

TEST_CASE("a client that reads late gets every streamed reply in order") {
    Sockets sockets;
    auto server = make_server(sockets.endpoint("s"));
    auto channel = make_channel(sockets.endpoint("s"));
    greet(*channel);
    Result<std::uint64_t> call = channel->send(text("stream"));
    REQUIRE(call.has_value());
    auto request = server->next(Deadline::after_ms(10000));
    REQUIRE(request.has_value());
    constexpr std::uint32_t kReplies = 3000;
    for (std::uint32_t i = 0; i < kReplies; ++i)
        REQUIRE(request->responder.send(msg::Encoded{{i}}, {msg::Bytes(2000)}));
    for (std::uint32_t i = 0; i < kReplies; ++i) {
        Result<Reply> reply = channel->receive(*call, Deadline::after_ms(10000), true);
        REQUIRE(reply.has_value());
        REQUIRE(std::get<msg::Encoded>(reply->body).ids[0] == i);
    }
}

TEST_CASE("a client that never reads is told so in its last reply, in place of silent loss") {
    Sockets sockets;
    auto server = make_server(sockets.endpoint("s"));
    auto channel = make_channel(sockets.endpoint("s"));
    greet(*channel);
    Result<std::uint64_t> call = channel->send(text("stream"));
    REQUIRE(call.has_value());
    auto request = server->next(Deadline::after_ms(10000));
    REQUIRE(request.has_value());
    std::uint32_t sent = 0;
    while (sent < 100000 && request->responder.send(msg::Encoded{{sent}}, {msg::Bytes(2000)}))
        ++sent;
    CHECK(sent < 100000);
    CHECK_FALSE(request->responder.send(msg::Encoded{{0}}));
    std::uint32_t received = 0;
    Result<Reply> reply = channel->receive(*call, Deadline::after_ms(10000), true);
    for (; reply.has_value(); ++received) {
        REQUIRE(std::get<msg::Encoded>(reply->body).ids[0] == received);
        reply = channel->receive(*call, Deadline::after_ms(10000), true);
    }
    CHECK(received == sent);
    CHECK(reply.error().code == ErrorCode::resource_exhausted);
    CHECK(reply.error().message.find("does not read") != std::string::npos);
    // Others are served, and so is this client's next request.
    Worker worker(*server, echo);
    CHECK(channel->call(text("abc"), {}, Deadline::after_ms(10000)).has_value());
}

TEST_CASE("a responder learns that its client is gone, and outlives its server") {
    Sockets sockets;
    auto server = make_server(sockets.endpoint("s"));
    auto channel = make_channel(sockets.endpoint("s"));
    greet(*channel);
    REQUIRE(channel->send(text("stream")).has_value());
    auto request = server->next(Deadline::after_ms(10000));
    REQUIRE(request.has_value());
    CHECK(request->responder.send(msg::Encoded{}));
    channel.reset();
    Deadline deadline = Deadline::after_ms(10000);
    bool alive = true;
    while (alive && !deadline.expired()) {
        alive = request->responder.send(msg::Encoded{});
        ::poll(nullptr, 0, 2);
    }
    CHECK_FALSE(alive);
    server.reset();
    CHECK_FALSE(request->responder.send(msg::Encoded{}));
    CHECK_FALSE(Responder().send(msg::Encoded{}));
}

TEST_CASE("replies given just before the server ends still arrive") {
    Sockets sockets;
    auto server = make_server(sockets.endpoint("s"));
    auto channel = make_channel(sockets.endpoint("s"));
    greet(*channel);
    Result<std::uint64_t> call = channel->send(text("last"));
    REQUIRE(call.has_value());
    auto request = server->next(Deadline::after_ms(10000));
    REQUIRE(request.has_value());
    for (std::uint32_t i = 0; i < 6; ++i) request->responder.send(msg::Encoded{{i}});
    server.reset();
    for (std::uint32_t i = 0; i < 6; ++i) {
        Result<Reply> reply = channel->receive(*call, Deadline::after_ms(10000), true);
        CAPTURE(i);
        REQUIRE_MESSAGE(reply.has_value(), (reply.has_value() ? "" : reply.error().message));
        CHECK(std::get<msg::Encoded>(reply->body).ids[0] == i);
    }
}

TEST_CASE("a request without a call id gets no reply, not even a refusal") {
    Sockets sockets;
    auto server = make_server(sockets.endpoint("s"), false);
    RawClient client(sockets.endpoint("s"));
    client.send(msg::encode({0, 0, msg::Prefetch{1, {2}, {0}}}));
    client.send(msg::encode({0, 0, msg::Ping{}}));
    client.send(msg::encode({0, 8, msg::Ping{}}));
    CHECK(client.receive().call_id == 8);
}

TEST_CASE("many clients come and go") {
    Sockets sockets;
    auto server = make_server(sockets.endpoint("s"));
    Worker worker(*server, echo);
    for (int i = 0; i < 40; ++i) {
        auto channel = make_channel(sockets.endpoint("s"));
        greet(*channel);
        CHECK(channel->call(text("abc"), {}, Deadline::after_ms(10000)).has_value());
    }
}
