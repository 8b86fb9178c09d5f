// Requests that begin with a saved session, and requests whose session is saved at their end.

#include <doctest/doctest.h>

#include <numeric>
#include <string>
#include <vector>

#include "tests/support/text.h"
#include "tests/unit/services/gateway/gateway_fixture.h"

namespace k3::gateway {

namespace {

msg::Submit session_request(std::vector<std::uint32_t> ids, std::uint32_t max_tokens,
                            std::string load, std::string save) {
    msg::Submit submit = test::submit_ids(std::move(ids), max_tokens);
    submit.load_session = std::move(load);
    submit.save_session = std::move(save);
    return submit;
}

std::vector<std::uint32_t> joined(std::vector<std::uint32_t> a,
                                  const std::vector<std::uint32_t>& b) {
    a.insert(a.end(), b.begin(), b.end());
    return a;
}

std::size_t n_rows(const test::FakeTrunk& trunk) {
    const std::vector<std::size_t> sizes = trunk.step_sizes();
    return std::accumulate(sizes.begin(), sizes.end(), std::size_t{0});
}

}  // namespace

TEST_CASE("a second turn computes only what the first has not") {
    GatewayFixture fixture({3, 6});
    fixture.start();
    test::GatewayClient client = fixture.client();
    const std::vector<std::uint32_t> prompt = ids_of("The first turn.");
    const test::Generation first = client.generate(session_request(prompt, 5, "", "chat"));
    REQUIRE_FALSE(first.error.has_value());
    CHECK_FALSE(first.loaded.has_value());
    // The last id of the answer has not been fed.
    std::vector<std::uint32_t> held = joined(prompt, first.ids);
    held.pop_back();
    REQUIRE(first.saved.has_value());
    CHECK(*first.saved == msg::SessionSaved{19, 3 * 4 * 19, {}});
    for (const auto& trunk : fixture.trunk) CHECK(trunk->saved().at("chat") == held);

    const std::vector<std::uint32_t> next = joined(joined(prompt, first.ids), ids_of(" More"));
    const std::size_t before = n_rows(*fixture.trunk[0]);
    const test::Generation second = client.generate(session_request(next, 4, "chat", ""));
    REQUIRE_FALSE(second.error.has_value());
    REQUIRE(second.loaded.has_value());
    CHECK(*second.loaded == msg::SessionLoaded{19, 19, 19});
    CHECK_FALSE(second.saved.has_value());
    CHECK(second.ids == expected_ids(*fixture.trunk[2], next, 4));
    CHECK(second.finished.n_prompt == next.size());
    CHECK(second.progress.back().prompt_done == next.size());
    // The rest of the prompt in one step, and one row for each token but the last.
    CHECK(n_rows(*fixture.trunk[0]) - before == (next.size() - 19) + 3);
    CHECK(fixture.counter("reused_tokens") == 19);
    CHECK(GatewayFixture::eventually([&] { return fixture.trunk[2]->n_sessions() == 0; }));
}

TEST_CASE("a session that the prompt does not continue changes nothing but the time") {
    GatewayFixture fixture;
    fixture.start();
    test::GatewayClient client = fixture.client();
    const std::vector<std::uint32_t> prompt = ids_of("Hello there");
    struct Case {
        std::string saved;
        msg::SessionLoaded expected;
    };
    for (const Case& c : {Case{"Hello where", {11, 6, 0}}, Case{"Hello there", {11, 11, 0}},
                          Case{"Hello there, all", {16, 11, 0}}, Case{"x", {1, 0, 0}}}) {
        CAPTURE(c.saved);
        fixture.trunk[0]->set_saved("s", ids_of(c.saved));
        const test::Generation out = client.generate(session_request(prompt, 3, "s", ""));
        REQUIRE_FALSE(out.error.has_value());
        REQUIRE(out.loaded.has_value());
        CHECK(*out.loaded == c.expected);
        CHECK(out.ids == expected_ids(*fixture.trunk[0], prompt, 3));
    }
}

TEST_CASE("files of different turns are refused, and no session is left open") {
    GatewayFixture fixture({4});
    fixture.start();
    test::GatewayClient client = fixture.client();
    fixture.trunk[0]->set_saved("s", ids_of("Hello the"));
    fixture.trunk[1]->set_saved("s", ids_of("Hello"));
    const test::Generation mixed =
        client.generate(session_request(ids_of("Hello there"), 3, "s", ""));
    REQUIRE(mixed.error.has_value());
    CHECK(mixed.error->code == ErrorCode::incompatible);
    CHECK(mixed.failed_service == "trunk-1");
    for (const char* part : {"'s'", "trunk-0 stands for 9 ids", "trunk-1 for 5"})
        CHECK_MESSAGE(test::contains(mixed.error->message, part), mixed.error->message);
    const test::Generation absent = client.generate(session_request(ids_of("Hello"), 3, "t", ""));
    REQUIRE(absent.error.has_value());
    CHECK(absent.error->code == ErrorCode::not_found);
    for (const auto& trunk : fixture.trunk)
        CHECK(GatewayFixture::eventually([&] { return trunk->n_sessions() == 0; }));
    CHECK_FALSE(client.generate(test::submit_text("Hello", 3)).error.has_value());
}

TEST_CASE("a save that fails is told, and the text is not lost") {
    GatewayFixture fixture({4});
    fixture.trunk[1]->set_fault([](const msg::Body& body) -> std::optional<msg::Failure> {
        if (!std::holds_alternative<msg::SaveSession>(body)) return std::nullopt;
        return msg::Failure{{ErrorCode::resource_exhausted, "no room for chat", "free some"}, ""};
    });
    fixture.start();
    test::GatewayClient client = fixture.client();
    const std::vector<std::uint32_t> prompt = ids_of("Hello");
    const test::Generation out = client.generate(session_request(prompt, 4, "", "chat"));
    REQUIRE_FALSE(out.error.has_value());
    CHECK(out.ids == expected_ids(*fixture.trunk[1], prompt, 4));
    CHECK(out.finished.reason == msg::FinishReason::max_tokens);
    REQUIRE(out.saved.has_value());
    REQUIRE(out.saved->failure.has_value());
    CHECK(out.saved->failure->error.message == "trunk-1: no room for chat");
    CHECK(out.saved->failure->service == "trunk-1");
}

TEST_CASE("names that are paths are refused before anything is computed") {
    GatewayFixture fixture;
    fixture.start();
    test::GatewayClient client = fixture.client();
    for (const std::string name : {"../x", "/etc/passwd", ".hidden", "a b", "a/b"}) {
        CAPTURE(name);
        for (const bool load : {false, true}) {
            const test::Generation out = client.generate(
                session_request(ids_of("Hi"), 1, load ? name : "", load ? "" : name));
            REQUIRE(out.error.has_value());
            CHECK(out.error->code == ErrorCode::invalid_argument);
            CHECK(test::contains(out.error->message, "'" + name + "'"));
        }
    }
    CHECK(fixture.trunk[0]->step_sizes().empty());
}

TEST_CASE("a request that is cancelled saves nothing") {
    GatewayFixture fixture;
    fixture.start();
    test::GatewayClient client = fixture.client();
    const std::uint64_t call = client.submit(session_request(ids_of("Hello"), 2000, "", "chat"));
    test::Generation out;
    client.collect_more(call, out, 5000, [](const test::Generation& g) { return g.n_events > 2; });
    client.cancel(out.accepted.request);
    client.collect_more(call, out, 5000);
    CHECK(out.finished.reason == msg::FinishReason::cancelled);
    CHECK_FALSE(out.saved.has_value());
    CHECK(fixture.trunk[0]->saved().empty());
}

}  // namespace k3::gateway
