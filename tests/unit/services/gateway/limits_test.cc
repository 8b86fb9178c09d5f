#include <doctest/doctest.h>

#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include "tests/support/text.h"
#include "tests/unit/services/gateway/gateway_fixture.h"

namespace k3::gateway {

using test::FakeTokenizer;
using test::Generation;
using test::submit_ids;
using test::submit_text;

namespace {

/// A trunk that writes letters for ever, slowly enough to be interrupted.
void make_endless(GatewayFixture& gateway) {
    gateway.trunk[0]->next = [](const std::vector<std::uint32_t>& history) {
        return static_cast<std::uint32_t>('a' + history.size() % 26);
    };
}

}  // namespace

TEST_CASE("what cannot be meant is refused in one sentence before any compute") {
    GatewayFixture gateway;
    gateway.trunk[0]->max_positions = 100;
    gateway.start();
    auto client = gateway.client();
    const auto refusal = [&](const msg::Submit& submit) {
        const Generation got = client.generate(submit);
        REQUIRE(got.error);
        CHECK(got.error->code == ErrorCode::invalid_argument);
        CHECK_FALSE(got.error->remedy.empty());
        CHECK(got.ids.empty());
        return got.error->message;
    };
    CHECK(test::contains(refusal(submit_text("", 5)), "empty"));
    CHECK(test::contains(refusal(submit_ids({}, 5)), "empty"));
    const std::string outside = refusal(submit_ids({1, 2, FakeTokenizer::kVocabSize}, 5));
    CHECK(test::contains(outside, "id 260 at position 2"));
    CHECK(test::contains(outside, "260"));
    const std::string too_long = refusal(submit_text(std::string(101, 'x'), 5));
    CHECK(test::contains(too_long, "101"));
    CHECK(test::contains(too_long, "100"));
    CHECK(test::contains(refusal(submit_text("ab\xFFgh", 5)), "byte 2"));
    msg::Submit submit = submit_text("abc", 5);
    submit.stop_ids = {999};
    CHECK(test::contains(refusal(submit), "stop id 999"));
    submit = submit_text("abc", 5);
    submit.params.top_p = 1.5F;
    CHECK(test::contains(refusal(submit), "top_p 1.5"));
    submit = submit_text("abc", 5);
    submit.stop_strings = {""};
    CHECK(test::contains(refusal(submit), "stop string 0"));
    CHECK(gateway.trunk[0]->step_sizes().empty());
    CHECK(gateway.counter("refused_requests") == 8);
    submit = submit_text("abc", 5);
    submit.n_logprobs = 50;  // already the codec's word
    CHECK(test::contains(refusal(submit), "50"));
    CHECK_FALSE(client.generate(submit_text("abc", 5)).error);
}

TEST_CASE("a cancelled request ends within a step and its session is dropped") {
    GatewayFixture gateway;
    make_endless(gateway);
    gateway.start();
    auto client = gateway.client();
    const auto call = client.submit(submit_text("abc", 0));
    const auto other = client.submit(submit_text("abc", 300));
    Generation got;
    client.collect_more(call, got, 20000, [](const Generation& g) { return g.ids.size() >= 5; });
    REQUIRE_FALSE(got.error);
    client.cancel(got.accepted.request);
    client.collect_more(call, got, 20000);
    REQUIRE_FALSE(got.error);
    CHECK(got.finished.reason == msg::FinishReason::cancelled);
    CHECK(got.finished.n_generated == got.ids.size());
    CHECK(client.collect(other).ids.size() == 300);
    CHECK(GatewayFixture::eventually([&] { return gateway.trunk[0]->n_sessions() == 0; }));
    CHECK(gateway.counter("cancelled_requests") == 1);
}

TEST_CASE("a cancel gives out the text that was held back") {
    GatewayFixture gateway;
    gateway.trunk[0]->next = [](const std::vector<std::uint32_t>&) { return std::uint32_t{'x'}; };
    gateway.start();
    auto client = gateway.client();
    msg::Submit submit = submit_text("abc", 0);
    submit.stop_strings = {std::string(4000, 'x') + "!"};
    const auto call = client.submit(submit);
    Generation got;
    client.collect_more(call, got, 20000, [](const Generation& g) { return g.ids.size() >= 5; });
    CHECK(got.text.empty());
    client.cancel(got.accepted.request);
    client.collect_more(call, got, 20000);
    CHECK(got.text == std::string(got.ids.size(), 'x'));
}

TEST_CASE("a request can be cancelled while it waits, and unknown ones are no error") {
    GatewayFixture gateway;
    make_endless(gateway);
    gateway.options.max_requests = 1;
    gateway.start();
    auto client = gateway.client();
    const auto running = client.submit(submit_text("abc", 0));
    Generation first;
    client.collect_more(running, first, 20000, [](const Generation& g) { return !g.ids.empty(); });
    const auto waiting = client.submit(submit_text("wait", 5));
    Generation second;
    client.collect_more(waiting, second, 20000,
                        [](const Generation& g) { return g.accepted.request != 0; });
    client.cancel(12345);
    client.cancel(second.accepted.request);
    client.collect_more(waiting, second, 20000);
    CHECK(second.finished.reason == msg::FinishReason::cancelled);
    CHECK(second.ids.empty());
    const auto done =
        client.channel().call(msg::Cancel{first.accepted.request}, {}, Deadline::after_ms(5000));
    REQUIRE(done);
    CHECK(std::holds_alternative<msg::Done>(done->body));
    client.collect_more(running, first, 20000);
    CHECK(first.finished.reason == msg::FinishReason::cancelled);
}

TEST_CASE("a client that went away ends its request") {
    GatewayFixture gateway;
    make_endless(gateway);
    gateway.start();
    {
        auto leaving = gateway.client();
        const auto call = leaving.submit(submit_text("abc", 0));
        Generation got;
        leaving.collect_more(call, got, 20000,
                             [](const Generation& g) { return g.ids.size() >= 3; });
    }
    CHECK(GatewayFixture::eventually([&] { return gateway.counter("clients_gone") == 1; }));
    CHECK(GatewayFixture::eventually([&] { return gateway.trunk[0]->n_sessions() == 0; }));
    CHECK_FALSE(gateway.client().generate(submit_text("abc", 5)).error);
}

TEST_CASE("requests beyond the queue are refused with the numbers") {
    GatewayFixture gateway;
    make_endless(gateway);
    gateway.options.max_requests = 2;
    gateway.options.max_queue = 3;
    gateway.start();
    auto client = gateway.client();
    std::vector<std::uint64_t> calls;
    for (int i = 0; i < 5; ++i) calls.push_back(client.submit(submit_text("abc", 0)));
    const Generation refused = client.generate(submit_text("abc", 5));
    REQUIRE(refused.error);
    CHECK(refused.error->code == ErrorCode::resource_exhausted);
    CHECK(test::contains(refused.error->message, "takes 2 and 3"));
    std::vector<Generation> got(5);
    for (std::size_t i = 0; i < 5; ++i) {
        client.collect_more(calls[i], got[i], 20000,
                            [](const Generation& g) { return g.accepted.request != 0; });
        client.cancel(got[i].accepted.request);
    }
    for (std::size_t i = 0; i < 5; ++i) {
        client.collect_more(calls[i], got[i], 20000);
        CHECK(got[i].finished.reason == msg::FinishReason::cancelled);
    }
    CHECK_FALSE(client.generate(submit_text("abc", 5)).error);
}

TEST_CASE("a session that can never fit is refused with the trunk's sentence") {
    GatewayFixture gateway;
    gateway.start();
    auto client = gateway.client();
    gateway.trunk[0]->set_fault([](const msg::Body& body) -> std::optional<msg::Failure> {
        if (!std::holds_alternative<msg::OpenSession>(body)) return std::nullopt;
        return msg::Failure{
            {ErrorCode::resource_exhausted, "a session needs 5 MB of 4 MB", "shorten it"}, "trunk"};
    });
    const Generation got = client.generate(submit_text("abc", 5));
    REQUIRE(got.error);
    CHECK(got.error->code == ErrorCode::resource_exhausted);
    CHECK(test::contains(got.error->message, "a session needs 5 MB of 4 MB"));
    CHECK(got.failed_service == "trunk");
}

TEST_CASE("messages for other services are refused and change nothing") {
    GatewayFixture gateway;
    gateway.start();
    auto client = gateway.client();
    const auto reply = client.channel().call(msg::DropSession{1}, {}, Deadline::after_ms(5000));
    REQUIRE_FALSE(reply);
    CHECK(reply.error().code == ErrorCode::unsupported);
    CHECK(test::contains(reply.error().message, "DropSession"));
    CHECK_FALSE(client.generate(submit_text("abc", 5)).error);
}

}  // namespace k3::gateway
