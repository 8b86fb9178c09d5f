#include <doctest/doctest.h>

#include <chrono>
#include <cmath>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "tests/support/socket_proxy.h"
#include "tests/support/text.h"
#include "tests/unit/services/gateway/gateway_fixture.h"

namespace k3::gateway {

using test::Generation;
using test::submit_text;

namespace {

std::int64_t ms_since(Clock::time_point start) {
    return std::chrono::duration_cast<std::chrono::milliseconds>(Clock::now() - start).count();
}

/// A request that has begun, and would never end.
struct Running {
    std::uint64_t call = 0;
    Generation got;
};

Running begin_endless(test::GatewayClient& client, const std::string& prompt) {
    Running out;
    out.call = client.submit(submit_text(prompt, 0));
    client.collect_more(out.call, out.got, 20000,
                        [](const Generation& g) { return g.ids.size() >= 3; });
    REQUIRE_FALSE(out.got.error);
    return out;
}

void check_ids(const Generation& got, const test::FakeTrunk& trunk, const std::string& prompt,
               std::size_t n) {
    REQUIRE_MESSAGE(!got.error.has_value(), got.error->message);
    CHECK(got.ids == expected_ids(trunk, ids_of(prompt), n));
}

/// Loses `stage` during two generations and brings it back.
void lose_and_recover(GatewayFixture& gateway, test::FakeStage& stage, const std::string& name) {
    for (auto& t : gateway.trunk) t->max_positions = 1'000'000;
    gateway.start();
    auto client = gateway.client();
    Running first = begin_endless(client, "one");
    Running second = begin_endless(client, "two");
    stage.stop();
    const auto lost_at = Clock::now();
    for (Running* running : {&first, &second}) {
        client.collect_more(running->call, running->got, 20000);
        REQUIRE(running->got.error);
        CHECK(running->got.error->code == ErrorCode::unavailable);
        CHECK(running->got.failed_service == name);
        CHECK(test::contains(running->got.error->message, name));
        CHECK_FALSE(running->got.error->remedy.empty());
    }
    CHECK(ms_since(lost_at) < 5000);
    // A request that comes while the stage is away waits for it.
    const auto waiting = client.submit(submit_text("three", 8));
    stage.start();
    check_ids(client.collect(waiting), *gateway.trunk.back(), "three", 8);
    check_ids(client.generate(submit_text("four", 8)), *gateway.trunk.back(), "four", 8);
    for (auto& t : gateway.trunk)
        CHECK(GatewayFixture::eventually([&] { return t->n_sessions() == 0; }));
}

}  // namespace

TEST_CASE("a trunk that dies fails its requests by name, and the next ones work") {
    GatewayFixture gateway;
    lose_and_recover(gateway, *gateway.trunk[0], "trunk");
}

TEST_CASE("a sampler that dies fails its requests by name, and the next ones work") {
    GatewayFixture gateway;
    lose_and_recover(gateway, gateway.sampler, "sampler");
}

TEST_CASE("a tokenizer that dies fails its requests by name, and the next ones work") {
    GatewayFixture gateway;
    lose_and_recover(gateway, gateway.tokenizer, "tokenizer");
}

TEST_CASE("a first, middle or last trunk stage that dies is survived") {
    for (const std::size_t which : {0U, 1U, 2U}) {
        GatewayFixture gateway({3, 6});
        lose_and_recover(gateway, *gateway.trunk[which], "trunk-" + std::to_string(which));
    }
}

TEST_CASE("a trunk that dies in the middle of a step is noticed") {
    GatewayFixture gateway;
    gateway.trunk[0]->max_positions = 1'000'000;
    gateway.start();
    auto client = gateway.client();
    Running running = begin_endless(client, "one");
    gateway.trunk[0]->mute = true;  // takes the step, never answers
    const std::uint64_t n = gateway.trunk[0]->n_requests();
    REQUIRE(gateway.trunk[0]->wait_for_requests(n + 1));
    gateway.trunk[0]->stop();
    const auto lost_at = Clock::now();
    client.collect_more(running.call, running.got, 20000);
    REQUIRE(running.got.error);
    CHECK(ms_since(lost_at) < 5000);
    CHECK(running.got.failed_service == "trunk");
    gateway.trunk[0]->mute = false;
    gateway.trunk[0]->start();
    check_ids(client.generate(submit_text("two", 8)), *gateway.trunk[0], "two", 8);
}

TEST_CASE("a stage that dies during a long step of another is noticed meanwhile") {
    GatewayFixture gateway;
    gateway.trunk[0]->max_positions = 1'000'000;
    gateway.start();
    auto client = gateway.client();
    Running running = begin_endless(client, "one");
    gateway.trunk[0]->mute = true;  // computes for longer than anybody waits here
    REQUIRE(gateway.trunk[0]->wait_for_requests(gateway.trunk[0]->n_requests() + 1));
    gateway.sampler.stop();
    const auto lost_at = Clock::now();
    client.collect_more(running.call, running.got, 20000);
    REQUIRE(running.got.error);
    CHECK(ms_since(lost_at) < 5000);
    CHECK(running.got.failed_service == "sampler");
    gateway.trunk[0]->mute = false;
    gateway.sampler.start();
    check_ids(client.generate(submit_text("two", 8)), *gateway.trunk[0], "two", 8);
    CHECK(GatewayFixture::eventually([&] { return gateway.trunk[0]->n_sessions() == 0; }));
}

TEST_CASE("a gateway asked to stop in the middle of a step does not wait for it") {
    GatewayFixture gateway;
    gateway.trunk[0]->max_positions = 1'000'000;
    gateway.start();
    auto client = gateway.client();
    Running running = begin_endless(client, "one");
    gateway.trunk[0]->mute = true;
    REQUIRE(gateway.trunk[0]->wait_for_requests(gateway.trunk[0]->n_requests() + 1));
    const auto asked_at = Clock::now();
    gateway.stop_gateway();
    CHECK(ms_since(asked_at) < 3000);
    client.collect_more(running.call, running.got, 5000);
    CHECK(running.got.error);
}

TEST_CASE("a connection that breaks and comes back costs only what was under way") {
    for (const bool idle : {false, true}) {
        GatewayFixture gateway;
        gateway.trunk[0]->max_positions = 1'000'000;
        const std::string front = gateway.dir.endpoint("proxy");
        test::SocketProxy proxy(front, gateway.trunk[0]->endpoint());
        gateway.options.stages.trunk = {front};
        gateway.start();
        auto client = gateway.client();
        check_ids(client.generate(submit_text("one", 8)), *gateway.trunk[0], "one", 8);
        if (!idle) {
            Running running = begin_endless(client, "two");
            proxy.cut();
            client.collect_more(running.call, running.got, 20000);
            REQUIRE(running.got.error);
            CHECK(running.got.failed_service == "trunk");
        } else {
            proxy.cut();
        }
        CAPTURE(idle);
        check_ids(client.generate(submit_text("three", 8)), *gateway.trunk[0], "three", 8);
        CHECK(GatewayFixture::eventually([&] { return gateway.trunk[0]->n_sessions() == 0; }));
    }
}

TEST_CASE("a trunk restarted while nothing runs costs no request") {
    GatewayFixture gateway;
    gateway.start();
    auto client = gateway.client();
    check_ids(client.generate(submit_text("one", 4)), *gateway.trunk[0], "one", 4);
    for (int i = 0; i < 3; ++i) {
        gateway.trunk[0]->stop();
        gateway.sampler.stop();
        gateway.sampler.start();
        gateway.trunk[0]->start();
        check_ids(client.generate(submit_text("two", 4)), *gateway.trunk[0], "two", 4);
    }
}

TEST_CASE("a cancel is heard while a stage is missing") {
    GatewayFixture gateway;
    gateway.start();
    auto client = gateway.client();
    check_ids(client.generate(submit_text("one", 4)), *gateway.trunk[0], "one", 4);
    gateway.trunk[0]->stop();
    Running waiting;
    waiting.call = client.submit(submit_text("two", 4));
    client.collect_more(waiting.call, waiting.got, 3000,
                        [](const Generation& g) { return g.accepted.request != 0; });
    // With the trunk away the tokenizer may not have been asked; then there is nothing to cancel.
    if (waiting.got.accepted.request != 0) {
        client.cancel(waiting.got.accepted.request);
        client.collect_more(waiting.call, waiting.got, 2000);
        CHECK(waiting.got.finished.reason == msg::FinishReason::cancelled);
    }
    const auto pong = client.channel().ping(Deadline::after_ms(500));
    CHECK(pong);
    gateway.trunk[0]->start();
    check_ids(client.generate(submit_text("three", 4)), *gateway.trunk[0], "three", 4);
}

TEST_CASE("a request does not wait for a missing stage for ever") {
    GatewayFixture gateway;
    gateway.options.wait_ms = 700;
    gateway.start();
    auto client = gateway.client();
    check_ids(client.generate(submit_text("one", 4)), *gateway.trunk[0], "one", 4);
    gateway.trunk[0]->stop();
    const auto asked_at = Clock::now();
    const Generation got = client.generate(submit_text("two", 4));
    REQUIRE(got.error);
    CHECK(ms_since(asked_at) >= 600);
    CHECK(ms_since(asked_at) < 5000);
    CHECK(got.error->code == ErrorCode::unavailable);
    CHECK(got.failed_service == "trunk");
    CHECK(test::contains(got.error->message, "700 ms"));
    CHECK(test::contains(got.error->message, "trunk"));
}

TEST_CASE("a step the trunk refuses fails its requests with the trunk's own sentence") {
    GatewayFixture gateway;
    gateway.start();
    auto client = gateway.client();
    gateway.trunk[0]->set_fault([](const msg::Body& body) -> std::optional<msg::Failure> {
        if (!std::holds_alternative<msg::Step>(body)) return std::nullopt;
        return msg::Failure{
            {ErrorCode::unavailable, "layer 5: nobody holds expert 17", "start its server"},
            "experts-1"};
    });
    const auto asked_at = Clock::now();
    const Generation got = client.generate(submit_text("one", 4));
    REQUIRE(got.error);
    CHECK(ms_since(asked_at) < 1500);
    CHECK(got.failed_service == "experts-1");
    CHECK(test::contains(got.error->message, "layer 5: nobody holds expert 17"));
    CHECK(got.error->remedy == "start its server");
    // The trunk is there, so nothing has to recover.
    gateway.trunk[0]->set_fault(nullptr);
    check_ids(client.generate(submit_text("two", 4)), *gateway.trunk[0], "two", 4);
    CHECK(GatewayFixture::eventually([&] { return gateway.trunk[0]->n_sessions() == 0; }));
}

TEST_CASE("one request's damaged logits do not fail the requests beside it") {
    GatewayFixture gateway;
    gateway.trunk[0]->spoil = [](const std::vector<std::uint32_t>& history,
                                 std::vector<float>& logits) {
        if (history[0] == 'b' && history.size() == 8) logits[7] = std::nanf("");
    };
    gateway.start();
    auto client = gateway.client();
    std::vector<std::uint64_t> calls;
    for (const char* prompt : {"aaa", "bbb", "ccc"})
        calls.push_back(client.submit(submit_text(prompt, 30)));
    check_ids(client.collect(calls[0]), *gateway.trunk[0], "aaa", 30);
    const Generation bad = client.collect(calls[1]);
    REQUIRE(bad.error);
    CHECK(bad.error->code == ErrorCode::corrupt);
    CHECK(bad.failed_service == "sampler");
    CHECK(bad.ids.size() == 5);
    check_ids(client.collect(calls[2]), *gateway.trunk[0], "ccc", 30);
}

TEST_CASE("a trunk that answers with another shape is blamed, not believed") {
    GatewayFixture gateway;
    gateway.trunk[0]->spoil = [](const std::vector<std::uint32_t>&, std::vector<float>& logits) {
        logits.pop_back();
    };
    gateway.trunk[0]->answer_vocab_size = test::FakeTokenizer::kVocabSize - 1;
    gateway.start();
    auto client = gateway.client();
    const Generation got = client.generate(submit_text("one", 4));
    REQUIRE(got.error);
    CHECK(got.error->code == ErrorCode::internal);
    CHECK(got.failed_service == "trunk");
    CHECK(test::contains(got.error->message, "[1, 259]"));
    CHECK(test::contains(got.error->message, "[1, 260]"));
}

TEST_CASE("the gateway is ready when all stages are, and says whom it waits for") {
    GatewayFixture gateway;
    gateway.tokenizer.start();
    gateway.sampler.start();
    gateway.trunk[0]->stays_loading = true;
    gateway.trunk[0]->start();
    gateway.start_gateway();
    transport::Channel::Options options;
    options.endpoint = gateway.endpoint();
    options.peer = "gateway";
    auto channel = transport::Channel::create(options);
    REQUIRE(channel);
    std::string detail;
    CHECK(GatewayFixture::eventually([&] {
        const auto pong = (*channel)->ping(Deadline::after_ms(1000));
        if (!pong.has_value()) return false;
        detail = pong->detail;
        return pong->state == msg::State::loading && test::contains(detail, "trunk") &&
               test::contains(detail, "42 %") && test::contains(detail, "layer 3") &&
               pong->progress_permille > 600;
    }));
    CAPTURE(detail);
    gateway.trunk[0]->stop();
    gateway.trunk[0]->stays_loading = false;
    gateway.trunk[0]->start();
    auto client = gateway.client();
    check_ids(client.generate(submit_text("one", 4)), *gateway.trunk[0], "one", 4);
}

TEST_CASE("a gateway that is stopped while it waits ends") {
    GatewayFixture gateway;
    gateway.start_gateway();
    gateway.stop_gateway();
    CHECK(gateway.connected);
}

TEST_CASE("stages on different checkpoints keep the gateway from becoming ready") {
    GatewayFixture gateway({4});
    gateway.trunk[1]->fingerprint = "ffffffffffffffffffffffffffffffff";
    gateway.start();
    gateway.join();
    REQUIRE_FALSE(gateway.connected);
    CHECK(gateway.connected.error().code == ErrorCode::incompatible);
    CHECK(test::contains(gateway.connected.error().message, "trunk-0"));
    CHECK(test::contains(gateway.connected.error().message, "trunk-1"));
}

TEST_CASE("a stage that comes back on another checkpoint is refused until it is right again") {
    GatewayFixture gateway;
    gateway.options.wait_ms = 1500;
    gateway.start();
    auto client = gateway.client();
    const std::string right = gateway.trunk[0]->fingerprint;
    gateway.trunk[0]->stop();
    gateway.trunk[0]->fingerprint = "ffffffffffffffffffffffffffffffff";
    gateway.trunk[0]->start();
    const Generation got = client.generate(submit_text("one", 4));
    REQUIRE(got.error);
    CHECK(got.error->code == ErrorCode::incompatible);
    CHECK(test::contains(got.error->message, right));
    CHECK(test::contains(got.error->message, "ffffffff"));
    gateway.trunk[0]->stop();
    gateway.trunk[0]->fingerprint = right;
    gateway.trunk[0]->start();
    check_ids(client.generate(submit_text("two", 4)), *gateway.trunk[0], "two", 4);
}

TEST_CASE("sessions that a former life left behind are dropped, those of others are not") {
    GatewayFixture gateway;
    gateway.start_stages();
    transport::Channel::Options options;
    options.endpoint = gateway.trunk[0]->endpoint();
    options.peer = "trunk";
    auto channel = transport::Channel::create(options);
    REQUIRE(channel);
    REQUIRE((*channel)->hello({}, Deadline::after_ms(5000)));
    const std::uint64_t own = first_session(gateway.endpoint(), 0);
    for (const std::uint64_t session : {own, own + 3, own + 1000, std::uint64_t{77}})
        REQUIRE((*channel)->call(msg::OpenSession{session, 10}, {}, Deadline::after_ms(5000)));
    CHECK(gateway.trunk[0]->n_sessions() == 4);
    gateway.start_gateway();
    auto client = gateway.client();
    check_ids(client.generate(submit_text("one", 4)), *gateway.trunk[0], "one", 4);
    CHECK(GatewayFixture::eventually([&] { return gateway.trunk[0]->n_sessions() == 2; }));
}

}  // namespace k3::gateway
