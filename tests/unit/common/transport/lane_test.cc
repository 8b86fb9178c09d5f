// Fast lanes: the same messages as through the socket, what does not fit goes there, and whatever
// somebody writes into the shared memory is noticed.

#include <doctest/doctest.h>
#include <fcntl.h>
#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstring>
#include <string>
#include <vector>

#include "common/transport/arena.h"
#include "common/transport/lane_host.h"
#include "common/transport/lane_link.h"
#include "common/transport/tensor_io.h"
#include "tests/unit/common/transport/fixtures.h"
#include "tests/unit/common/transport/process.h"

using namespace k3;
using namespace k3::transport;
using namespace k3::transport::test;

namespace {

constexpr std::int64_t kWaitMs = 20000;
constexpr std::uint32_t kSlotBytes = 16384;

std::unique_ptr<Arena> make_caller_arena() {
    static int n = 0;
    auto arena = Arena::create({segment_name(7, "lane-test-" + std::to_string(++n)), 4096, 1});
    REQUIRE_MESSAGE(arena.has_value(), (arena.has_value() ? "" : arena.error().message));
    return std::move(arena).value();
}

/// A caller that wants a lane, and the segment that shows it is on this box.
struct Caller {
    explicit Caller(const std::string& endpoint, bool use_lane = true) {
        Channel::Options options;
        options.endpoint = endpoint;
        options.peer = "echo";
        options.use_lane = use_lane;
        channel = std::move(Channel::create(std::move(options))).value();
    }
    msg::Announcement greet() const {
        auto answer = channel->hello({arena->probe()}, Deadline::after_ms(kWaitMs));
        REQUIRE_MESSAGE(answer.has_value(), (answer.has_value() ? "" : answer.error().message));
        return std::move(answer).value();
    }
    Result<Reply> call(std::uint32_t layer, std::vector<msg::Bytes> frames = {}) const;

    std::unique_ptr<Arena> arena = make_caller_arena();
    std::unique_ptr<Channel> channel;
};

msg::ExpertCall expert_call(std::uint32_t layer) {
    msg::ExpertCall call;
    call.layer = layer;
    call.picks = {{0, 3, 0.5F, 0}, {0, 7, 0.25F, 1}};
    return call;
}

Result<Reply> Caller::call(std::uint32_t layer, std::vector<msg::Bytes> frames) const {
    return channel->call(expert_call(layer), std::move(frames), Deadline::after_ms(kWaitMs));
}

/// A server with two lanes; its requests are taken by the test itself or by a Worker.
struct Host {
    explicit Host(std::int64_t spin = -1) : spin_us(spin) { start(); }
    void start() {
        LaneHost::Options lanes;
        lanes.sizes = {2, kSlotBytes, kSlotBytes};
        lanes.cores = {{0, 1, 2, 3, 8}, 5};
        lanes.spin_us = spin_us;
        Server::Options options = server_options(endpoint);
        options.lanes = std::move(LaneHost::create(lanes)).value();
        auto made = Server::create(std::move(options));
        REQUIRE_MESSAGE(made.has_value(), (made.has_value() ? "" : made.error().message));
        server = std::move(made).value();
        server->set_ready({});
    }
    Request next() const {
        auto request = server->next(Deadline::after_ms(kWaitMs));
        REQUIRE(request.has_value());
        return std::move(*request);
    }

    const std::int64_t spin_us;
    Sockets sockets;
    std::string endpoint = sockets.endpoint("s");
    std::unique_ptr<Server> server;
};

/// Answers an ExpertCall with its layer and frames; layer 99 gets a reply that no slot holds.
void answer(Request& request) {
    const auto* call = std::get_if<msg::ExpertCall>(&request.envelope.body);
    if (call == nullptr) return echo(request);
    msg::PartialSums sums;
    sums.compute_ns = call->layer;
    sums.read_ns = call->picks.size();
    if (call->layer == 99) request.frames.emplace_back(kSlotBytes);
    request.responder.send(std::move(sums), std::move(request.frames));
}

msg::Bytes lane_pattern(std::size_t bytes) {
    msg::Bytes out(bytes);
    for (std::size_t i = 0; i < bytes; ++i) out[i] = static_cast<std::byte>(i * 7 + 1);
    return out;
}

void check_answer(const Result<Reply>& reply, std::uint32_t layer,
                  const std::vector<msg::Bytes>& frames = {}) {
    REQUIRE_MESSAGE(reply.has_value(), (reply.has_value() ? "" : reply.error().message));
    const auto* sums = std::get_if<msg::PartialSums>(&reply->body);
    REQUIRE(sums != nullptr);
    CHECK(sums->compute_ns == layer);
    CHECK(sums->read_ns == 2);
    CHECK(reply->frames == frames);
}

std::uint64_t lane_requests(Channel& channel) {
    auto reply = expect<msg::Statistics>(
        channel.call(msg::GetStatistics{}, {}, Deadline::after_ms(kWaitMs)), "server");
    REQUIRE(reply.has_value());
    for (const msg::Counter& counter : reply->counters)
        if (counter.name == "transport_lane_requests") return counter.value;
    FAIL("no counter");
    return 0;
}

}  // namespace

TEST_CASE("a lane and the socket carry the same calls and replies") {
    for (std::int64_t spin_us : {0, 200}) {
        Host host(spin_us);
        Worker worker(*host.server, answer);
        Caller by_lane(host.endpoint);
        Caller by_socket(host.endpoint, false);
        CHECK(by_lane.greet().lane.pid == static_cast<std::uint32_t>(::getpid()));
        CHECK(by_socket.greet().lane.pid == 0);
        CHECK(by_lane.channel->lane().peer_cores.cores == CoreSet{0, 1, 2, 3, 8});
        CHECK(by_lane.channel->lane().peer_cores.n_threads == 5);
        by_lane.channel->set_lane_spin_us(static_cast<std::uint32_t>(spin_us));
        std::uint32_t n = 0;
        for (std::size_t bytes : {0, 1, 63, 64, 1000, 14336}) {
            const std::vector<msg::Bytes> frames = {lane_pattern(bytes), lane_pattern(bytes / 8)};
            ++n;
            check_answer(by_lane.call(n, frames), n, frames);
            check_answer(by_socket.call(n, frames), n, frames);
        }
        CHECK(by_lane.channel->lane().n_sent == n);
        CHECK(by_socket.channel->lane().n_sent == 0);
        CHECK(lane_requests(*by_socket.channel) == n);
    }
}

TEST_CASE("what a lane does not take goes through the socket") {
    Host host;
    Caller caller(host.endpoint);
    caller.greet();
    SUBCASE("a second call while one is outstanding, answered in any order") {
        CHECK(caller.channel->lane_takes(100, 100));
        auto first = caller.channel->send(expert_call(1));
        CHECK_FALSE(caller.channel->lane_takes(100, 100));
        auto second = caller.channel->send(expert_call(2));
        CHECK(caller.channel->lane().n_sent == 1);
        Request one = host.next();
        Request other = host.next();
        answer(one);
        answer(other);
        check_answer(caller.channel->receive(*second, Deadline::after_ms(kWaitMs)), 2);
        check_answer(caller.channel->receive(*first, Deadline::after_ms(kWaitMs)), 1);
    }
    SUBCASE("larger than a slot, on either way") {
        CHECK_FALSE(caller.channel->lane_takes(kSlotBytes, 0));
        CHECK_FALSE(caller.channel->lane_takes(0, kSlotBytes));
        Worker worker(*host.server, answer);
        const std::vector<msg::Bytes> large = {lane_pattern(kSlotBytes)};
        check_answer(caller.call(3, large), 3, large);
        CHECK(caller.channel->lane().n_sent == 0);
        check_answer(caller.call(99), 99, {msg::Bytes(kSlotBytes)});
        CHECK(caller.channel->lane().n_sent == 1);
        check_answer(caller.call(4), 4);
        CHECK(caller.channel->lane().n_sent == 2);
    }
    SUBCASE("messages of other kinds") {
        Worker worker(*host.server, answer);
        auto reply = caller.channel->call(text("ab"), {}, Deadline::after_ms(kWaitMs));
        REQUIRE(reply.has_value());
        CHECK(std::get<msg::Encoded>(reply->body).ids.size() == 2);
        CHECK(caller.channel->lane().n_sent == 0);
    }
}

TEST_CASE("errors come through a lane as they are") {
    Host host;
    Caller caller(host.endpoint);
    caller.greet();
    auto call = caller.channel->send(expert_call(1));
    host.next().responder.send_error({ErrorCode::corrupt, "scale byte 255", "restore it"});
    auto reply = caller.channel->receive(*call, Deadline::after_ms(kWaitMs));
    REQUIRE_FALSE(reply.has_value());
    CHECK(reply.error().code == ErrorCode::corrupt);
    CHECK(reply.error().message == "echo: scale byte 255");
    CHECK(caller.channel->failed_service() == "echo");
    CHECK(caller.channel->lane().is_open);
}

TEST_CASE("a call that met its deadline keeps the lane busy until it is answered") {
    Host host;
    Caller caller(host.endpoint);
    caller.greet();
    auto call = caller.channel->send(expert_call(1));
    CHECK(caller.channel->receive(*call, Deadline::after_ms(30)).error().code ==
          ErrorCode::deadline_exceeded);
    caller.channel->forget(*call);
    Request late = host.next();
    auto next = caller.channel->send(expert_call(2));
    CHECK(caller.channel->lane().n_sent == 1);
    answer(late);
    Request other = host.next();
    answer(other);
    check_answer(caller.channel->receive(*next, Deadline::after_ms(kWaitMs)), 2);
    CHECK(caller.channel->lane_takes(100, 100));
}

TEST_CASE("a lane is for callers on this box, one for each, as long as there are some") {
    Host host;
    std::vector<std::unique_ptr<Caller>> callers;
    for (int i = 0; i < 3; ++i) callers.push_back(std::make_unique<Caller>(host.endpoint));
    auto nowhere = callers[0]->channel->hello({{"/k3-7-elsewhere-1", 5}}, Deadline::after_ms(9000));
    REQUIRE(nowhere.has_value());
    CHECK(nowhere->lane.pid == 0);
    REQUIRE(callers[0]->channel->hello({}, Deadline::after_ms(kWaitMs)).has_value());
    CHECK_FALSE(callers[0]->channel->lane().is_open);

    const msg::LaneOffer first = callers[0]->greet().lane;
    const msg::LaneOffer again = callers[0]->greet().lane;  // the same one, with another token
    CHECK(again.index == first.index);
    CHECK(again.token != first.token);
    CHECK(callers[1]->greet().lane.index != first.index);
    CHECK(callers[2]->greet().lane.pid == 0);
    Worker worker(*host.server, answer);
    for (const auto& caller : callers) check_answer(caller->call(1), 1);
    CHECK(callers[2]->channel->lane().n_sent == 0);

    callers.erase(callers.begin());  // its segment is gone: so is the caller
    CHECK(callers[1]->greet().lane.index == first.index);
    check_answer(callers[1]->call(2), 2);
    CHECK(callers[1]->channel->lane().n_sent == 1);
}

TEST_CASE("whatever is written into the reply is noticed, and the next call takes the socket") {
    Host host;
    Caller caller(host.endpoint);
    const msg::LaneOffer offer = caller.greet().lane;
    const LaneSegment segment = std::move(LaneSegment::open(offer)).value();
    const LaneSlot reply = segment.reply(offer.index);
    const LaneSlot request = segment.request(offer.index);
    auto call = caller.channel->send(expert_call(1));
    Request taken = host.next();
    const std::uint32_t number = request.head().number.value;
    const msg::Bytes garbage = lane_pattern(256);
    const msg::Bytes other = msg::encode({0, *call + 1, msg::PartialSums{}});
    bool is_cut_short = false;
    SUBCASE("bytes that are no message") { reply.put(number, offer.token, garbage, {}); }
    SUBCASE("the reply to another call") { reply.put(number, offer.token, other, {}); }
    SUBCASE("of another user") { reply.put(number, offer.token + 1, other, {}); }
    SUBCASE("a number of the future") { reply.put(number + 1, offer.token, other, {}); }
    SUBCASE("more bytes than a slot has") {
        reply.head().token = offer.token;
        reply.head().envelope_bytes = kSlotBytes;
        set_and_wake(reply.head().number, number);
    }
    SUBCASE("more frames than a head has") {
        reply.head().token = offer.token;
        reply.head().n_frames = 1000;
        set_and_wake(reply.head().number, number);
    }
    SUBCASE("the request was overwritten") { set_and_wake(request.head().number, 77); }
    SUBCASE("a reply that is cut short") {
        // Readable up to its call id: then it is a bad message like any other.
        const msg::Bytes whole = msg::encode({0, *call, msg::PartialSums{}});
        reply.put(number, offer.token, std::span(whole).first(whole.size() - 8), {});
        is_cut_short = true;
    }
    auto failed = caller.channel->receive(*call, Deadline::after_ms(kWaitMs));
    REQUIRE_FALSE(failed.has_value());
    if (!is_cut_short) {
        CHECK_MESSAGE(failed.error().code == ErrorCode::stale, failed.error().message);
        CHECK(failed.error().message.find("fast lane to echo") != std::string::npos);
        CHECK_FALSE(caller.channel->lane().is_open);
    }
    answer(taken);  // too late for this call, and not taken for the next one's
    Worker worker(*host.server, answer);
    check_answer(caller.call(2), 2);
    CHECK(caller.greet().lane.pid != 0);  // a new hello gives a clean one
    check_answer(caller.call(3), 3);
}

TEST_CASE("whatever is written into a request is refused, and the server serves on") {
    Host host;
    Worker worker(*host.server, answer);
    Caller caller(host.endpoint);
    Caller foreign(host.endpoint);  // gives its lane to this test
    caller.greet();
    const msg::LaneOffer offer = foreign.greet().lane;
    const LaneSegment segment = std::move(LaneSegment::open(offer)).value();
    const LaneSlot request = segment.request(offer.index);
    const LaneSlot reply = segment.reply(offer.index);
    const auto answered = [&](std::uint32_t number) {
        set_and_wake(segment.bell(), 1);
        const Deadline deadline = Deadline::after_ms(kWaitMs);
        while (reply.head().number.value != number && !deadline.expired())
            check_answer(caller.call(1), 1);
        msg::Bytes buffer;
        Incoming message;
        REQUIRE(reply.take(number, buffer, message).has_value());
        std::uint64_t call_id = 0;
        auto envelope = msg::decode(message.envelope, call_id);
        REQUIRE(envelope.has_value());
        const auto* failure = std::get_if<msg::Failure>(&envelope->body);
        REQUIRE(failure != nullptr);
        return failure->error.code;
    };
    const msg::Bytes good = msg::encode({0, 9, expert_call(1)});
    request.put(1, offer.token, lane_pattern(256), {});
    CHECK(answered(1) == ErrorCode::invalid_argument);
    request.put(2, offer.token, msg::encode({0, 9, msg::Ping{}}), {});
    CHECK(answered(2) == ErrorCode::unsupported);
    request.head().token = offer.token;
    request.head().envelope_bytes = 0xFFFFFFFF;
    request.head().number.value = 3;
    CHECK(answered(3) == ErrorCode::corrupt);
    request.head().n_frames = 0xFFFFFFFF;
    request.head().number.value = 4;
    CHECK(answered(4) == ErrorCode::corrupt);
    // Of a former user of the lane: not answered.
    request.put(5, offer.token + 1, good, {});
    set_and_wake(segment.bell(), 1);
    for (std::uint32_t i = 0; i < 20; ++i) check_answer(caller.call(i), i);
    CHECK(reply.head().number.value == 4);
}

TEST_CASE("a lane that cannot be trusted is not opened") {
    const LaneSegment good = std::move(LaneSegment::create({1, 4096, 4096})).value();
    msg::LaneOffer offer = good.offer();
    CHECK(LaneSegment::open(offer).has_value());
    const auto code = [](const msg::LaneOffer& o) { return LaneSegment::open(o).error().code; };
    offer.index = 1;
    CHECK(code(offer) == ErrorCode::corrupt);
    offer = good.offer();
    ++offer.nonce;
    CHECK(code(offer) == ErrorCode::stale);
    offer = good.offer();
    offer.fd = 1'000'000;
    CHECK(code(offer) == ErrorCode::not_found);
    offer = good.offer();
    offer.pid = 0x7FFFFFFF;
    CHECK(code(offer) == ErrorCode::not_found);

    // The same bytes, but without seals: whoever maps it could be hit by SIGBUS.
    const Fd soft(::memfd_create("k3-test", MFD_CLOEXEC | MFD_ALLOW_SEALING));
    LaneHeader header;
    header.n_lanes = 1;
    header.nonce = 5;
    header.request_bytes = header.reply_bytes = 4096;
    REQUIRE(::ftruncate(soft.get(), 3 * 4096) == 0);
    const auto write_header = [&] {
        REQUIRE(::pwrite(soft.get(), &header, sizeof(header), 0) == ssize_t{sizeof(header)});
    };
    write_header();
    offer = {static_cast<std::uint32_t>(::getpid()),
             static_cast<std::uint32_t>(soft.get()),
             5,
             0,
             1,
             1,
             ""};
    CHECK(code(offer) == ErrorCode::corrupt);
    REQUIRE(::fcntl(soft.get(), F_ADD_SEALS, F_SEAL_SHRINK) == 0);
    CHECK(LaneSegment::open(offer).has_value());
    header.layout_version = 2;
    write_header();
    CHECK(code(offer) == ErrorCode::incompatible);
    header = {};
    header.nonce = 5;
    header.n_lanes = 1;
    header.request_bytes = 4096;
    header.reply_bytes = 8192;  // more than is there
    write_header();
    CHECK(code(offer) == ErrorCode::corrupt);
    // Any other file of this process.
    Sockets folder;
    const Fd file(::open(folder.path("file").c_str(), O_CREAT | O_RDWR, 0600));
    offer.fd = static_cast<std::uint32_t>(file.get());
    CHECK(code(offer) == ErrorCode::corrupt);
}

TEST_CASE("a server that ends fails the call in its lane, and its successor gives another lane") {
    Host host;
    Caller caller(host.endpoint);
    caller.greet();
    auto call = caller.channel->send(expert_call(1));
    static_cast<void>(host.next());
    host.server.reset();
    auto reply = caller.channel->receive(*call, Deadline::after_ms(kWaitMs));
    REQUIRE_FALSE(reply.has_value());
    CHECK(reply.error().code == ErrorCode::unavailable);
    CHECK(reply.error().message.find("closed the connection while ExpertCall was outstanding") !=
          std::string::npos);
    CHECK_FALSE(caller.channel->lane().is_open);
    host.start();
    Worker worker(*host.server, answer);
    CHECK(caller.greet().lane.pid != 0);
    check_answer(caller.call(2), 2);
    CHECK(caller.channel->lane().n_sent == 2);
}

TEST_CASE("a server that sleeps on its lanes hears of requests from the socket and of a stop") {
    Host host;
    Caller caller(host.endpoint, false);
    caller.greet();
    std::thread server([&] {
        while (auto request = host.server->next(Deadline::after_ms(60'000))) answer(*request);
    });
    for (std::uint32_t i = 0; i < 50; ++i) check_answer(caller.call(i), i);
    const Clock::time_point begin = Clock::now();
    host.server->request_stop();
    server.join();
    CHECK(Clock::now() - begin < std::chrono::seconds(20));
}

TEST_CASE("a killed server fails the call in its lane as soon as its connection ends") {
    Sockets sockets;
    PeerProcess peer(sockets.endpoint("s"));
    Caller caller(sockets.endpoint("s"));
    CHECK(caller.greet().lane.pid == static_cast<std::uint32_t>(peer.pid()));
    check_answer(caller.call(0), 0);
    auto call = caller.channel->send(expert_call(1));  // it computes for ever
    CHECK(caller.channel->receive(*call, Deadline::after_ms(100)).error().code ==
          ErrorCode::deadline_exceeded);
    const Clock::time_point begin = Clock::now();
    peer.signal(SIGKILL);
    auto reply = caller.channel->receive(*call, Deadline::after_ms(kWaitMs));
    MESSAGE("noticed after "
            << std::chrono::duration_cast<std::chrono::microseconds>(Clock::now() - begin).count()
            << " us");
    REQUIRE_FALSE(reply.has_value());
    CHECK(reply.error().code == ErrorCode::unavailable);
    CHECK(reply.error().message.find("closed the connection") != std::string::npos);
    CHECK(caller.channel->lane().n_sent == 2);
}

TEST_CASE("a frozen server is noticed by its silence, in the time of the socket") {
    Sockets sockets;
    PeerProcess peer(sockets.endpoint("s"));
    Caller patient(sockets.endpoint("s"));
    Channel::Options options = patient.channel->options();
    options.ping_ms = 50;
    options.liveness_ms = 400;
    patient.channel = std::move(Channel::create(options)).value();
    patient.greet();
    auto call = patient.channel->send(expert_call(1));
    CHECK(patient.channel->receive(*call, Deadline::after_ms(1000)).error().code ==
          ErrorCode::deadline_exceeded);  // it computes, and pongs say so
    peer.signal(SIGSTOP);
    auto reply = patient.channel->receive(*call, Deadline::after_ms(kWaitMs));
    peer.signal(SIGCONT);
    REQUIRE_FALSE(reply.has_value());
    CHECK(reply.error().code == ErrorCode::unavailable);
    CHECK(reply.error().message.find("silent for 400 ms") != std::string::npos);
}
