#include <doctest/doctest.h>

#include <cstdint>
#include <string>
#include <vector>

#include "tests/unit/services/gateway/gateway_fixture.h"

namespace k3::gateway {

using test::FakeTokenizer;
using test::Generation;
using test::submit_ids;
using test::submit_text;

namespace {

void check_right(const Generation& got, const test::FakeTrunk& trunk, const std::string& prompt,
                 std::size_t n) {
    REQUIRE_MESSAGE(!got.error.has_value(), got.error->message);
    const auto ids = expected_ids(trunk, ids_of(prompt), n);
    CHECK(got.ids == ids);
    CHECK(got.text == text_of(ids));
    CHECK(got.finished.reason == msg::FinishReason::max_tokens);
    CHECK(got.finished.n_prompt == prompt.size());
    CHECK(got.finished.n_generated == n);
}

}  // namespace

TEST_CASE("a request streams its tokens and its text") {
    GatewayFixture gateway;
    gateway.start();
    auto client = gateway.client();
    const Generation got = client.generate(submit_text("hello world", 20));
    check_right(got, *gateway.trunk[0], "hello world", 20);
    CHECK(got.accepted.prompt_ids == ids_of("hello world"));
    CHECK(got.accepted.request != 0);
    CHECK(got.n_events == 20);
    REQUIRE(got.progress.size() == 1);
    CHECK(got.progress[0].prompt_done == 11);
    CHECK(got.progress[0].prompt_total == 11);
    CHECK(got.finished.prefill_ns > 0);
    CHECK(got.finished.decode_ns > 0);
    // The session ends with the request.
    CHECK(GatewayFixture::eventually([&] { return gateway.trunk[0]->n_sessions() == 0; }));
}

TEST_CASE("requests side by side get what each gets alone") {
    GatewayFixture gateway;
    gateway.options.max_requests = 5;  // fewer than requests: some wait for a place
    gateway.options.prefill_chunk = 3;
    gateway.start();
    auto client = gateway.client();
    std::vector<std::uint64_t> calls;
    std::vector<std::string> prompts;
    for (std::size_t i = 0; i < 9; ++i) {
        prompts.push_back("prompt " + std::string(i * 5, 'x') + std::to_string(i));
        calls.push_back(client.submit(submit_text(prompts[i], 5 + 3 * static_cast<unsigned>(i))));
    }
    for (std::size_t i = 0; i < calls.size(); ++i)
        check_right(client.collect(calls[i]), *gateway.trunk[0], prompts[i], 5 + 3 * i);
    bool mixed = false;
    for (const std::size_t n : gateway.trunk[0]->step_sizes()) mixed = mixed || n > 3;
    CHECK(mixed);
}

TEST_CASE("chunk and step sizes change nothing") {
    const std::string prompt = "a prompt of thirty characters!";
    for (const std::uint32_t chunk : {1U, 2U, 7U, 256U}) {
        for (const std::uint32_t max_rows : {1U, 3U, 512U}) {
            GatewayFixture gateway;
            gateway.options.prefill_chunk = chunk;
            gateway.trunk[0]->max_step_rows = max_rows;
            gateway.start();
            auto client = gateway.client();
            const auto other = client.submit(submit_text("another one", 12));
            CAPTURE(chunk);
            CAPTURE(max_rows);
            check_right(client.generate(submit_text(prompt, 12)), *gateway.trunk[0], prompt, 12);
            check_right(client.collect(other), *gateway.trunk[0], "another one", 12);
        }
    }
}

TEST_CASE("rows pass through every stage, by reference or inline") {
    for (const std::vector<std::uint32_t>& cuts :
         std::vector<std::vector<std::uint32_t>>{{4}, {1, 2, 8}}) {
        for (const int way : {0, 1, 2}) {  // shared memory, refused by the gateway, no arena
            GatewayFixture gateway(cuts);
            gateway.options.prefill_chunk = 4;
            gateway.options.stages.use_shm = way != 1;
            for (auto& stage : gateway.trunk) stage->use_arena = way != 2;
            gateway.start();
            auto client = gateway.client();
            CAPTURE(way);
            check_right(client.generate(submit_text("through the stages", 9)),
                        *gateway.trunk.back(), "through the stages", 9);
            CHECK((gateway.trunk.back()->n_shm_inputs() > 0) == (way == 0));
            CHECK((gateway.sampler.n_shm_inputs() > 0) == (way == 0));
            CHECK(gateway.trunk.front()->step_sizes() == gateway.trunk.back()->step_sizes());
        }
    }
}

TEST_CASE("text, ids and chat are the three ways to give a prompt") {
    GatewayFixture gateway;
    gateway.start();
    auto client = gateway.client();
    check_right(client.generate(submit_text("abc", 3)), *gateway.trunk[0], "abc", 3);
    check_right(client.generate(submit_ids(ids_of("abc"), 3)), *gateway.trunk[0], "abc", 3);
    msg::Submit chat = submit_text("", 3);
    chat.input = msg::ChatInput{"{\"messages\":[]}"};
    const Generation got = client.generate(chat);
    std::vector<std::uint32_t> ids = ids_of("{\"messages\":[]}");
    ids.insert(ids.begin(), FakeTokenizer::kSpecial);
    CHECK(got.accepted.prompt_ids == ids);
    CHECK(got.ids == expected_ids(*gateway.trunk[0], ids, 3));
}

TEST_CASE("a stop id ends the text, is among the ids and not in the text") {
    GatewayFixture gateway;
    gateway.trunk[0]->next = says(3, ids_of("yes"));
    gateway.start();
    auto client = gateway.client();
    msg::Submit submit = submit_text("abc", 0);
    Generation got = client.generate(submit);
    CHECK(got.text == "yes");
    CHECK(got.finished.reason == msg::FinishReason::stop_id);
    CHECK(got.finished.stop_id == FakeTokenizer::kStop);
    CHECK(got.finished.n_generated == 4);
    CHECK(got.ids.back() == FakeTokenizer::kStop);

    submit.stop_ids = {'e'};
    got = client.generate(submit);
    CHECK(got.text == "y");
    CHECK(got.finished.stop_id == 'e');
    CHECK(got.ids == ids_of("ye"));

    submit = submit_text("abc", 6);
    submit.ignore_eos = true;
    got = client.generate(submit);
    CHECK(got.text == "yes<stop><stop><stop>");
    CHECK(got.finished.reason == msg::FinishReason::max_tokens);
    submit.skip_specials = true;
    CHECK(client.generate(submit).text == "yes");
    // The request's own stop ids hold even then.
    submit.stop_ids = {FakeTokenizer::kStop};
    CHECK(client.generate(submit).finished.reason == msg::FinishReason::stop_id);
}

TEST_CASE("a stop string ends the text wherever tokens begin and end") {
    GatewayFixture gateway;
    std::vector<std::uint32_t> answer = ids_of("one ");
    answer.push_back(FakeTokenizer::kLong);  // "hello" in one token
    for (const std::uint32_t id : ids_of(" two END three")) answer.push_back(id);
    gateway.trunk[0]->next = says(3, answer);
    gateway.start();
    auto client = gateway.client();
    const auto generate = [&](const std::vector<std::string>& stops, std::uint32_t max_tokens = 0) {
        msg::Submit submit = submit_text("abc", max_tokens);
        submit.stop_strings = stops;
        return client.generate(submit);
    };
    Generation got = generate({"END"});
    CHECK(got.text == "one hello two ");
    CHECK(got.finished.reason == msg::FinishReason::stop_string);
    CHECK(got.finished.stop_string == "END");
    CHECK(got.finished.n_generated == 4 + 1 + 5 + 3);
    CHECK(generate({"ell"}).text == "one h");            // inside one token
    CHECK(generate({" hello t", "zzz"}).text == "one");  // over several
    CHECK(generate({"END", "two"}).finished.stop_string == "two");
    // Held back as the beginning of a stop string, and given out at the end after all.
    CHECK(generate({" two X"}).text == "one hello two END three");
    CHECK(generate({" two X"}, 8).text == "one hello tw");
    CHECK(generate({" two X"}, 8).finished.reason == msg::FinishReason::max_tokens);
    // A stop string that is complete with the last token allowed is the reason.
    CHECK(generate({"hello"}, 5).finished.reason == msg::FinishReason::stop_string);
}

TEST_CASE("half a character is held back until it is whole") {
    GatewayFixture gateway;
    gateway.trunk[0]->next = says(3, ids_of("a\xC3\xA9\xE2\x82\xAC\xF0\x9F\x98\x80z"));
    gateway.start();
    auto client = gateway.client();
    const auto call = client.submit(submit_text("abc", 0));
    Generation got;
    std::vector<std::string> texts;
    client.collect_more(call, got, 20000, [&](const Generation& so_far) {
        texts.push_back(so_far.text);
        return false;
    });
    CHECK(got.text == "a\xC3\xA9\xE2\x82\xAC\xF0\x9F\x98\x80z");
    for (const std::string& text : texts)
        CHECK((text.empty() || text == "a" || text == "a\xC3\xA9" ||
               text == "a\xC3\xA9\xE2\x82\xAC" || text == "a\xC3\xA9\xE2\x82\xAC\xF0\x9F\x98\x80" ||
               text == got.text));
}

TEST_CASE("a token limit inside a character gives a replacement character") {
    GatewayFixture gateway;
    gateway.trunk[0]->next = says(3, ids_of("a\xE2\x82\xAC"));
    gateway.start();
    auto client = gateway.client();
    CHECK(client.generate(submit_text("abc", 2)).text == "a\xEF\xBF\xBD");
    CHECK(client.generate(submit_text("abc", 3)).text == "a\xEF\xBF\xBD");
    CHECK(client.generate(submit_text("abc", 4)).text == "a\xE2\x82\xAC");
    // So does a stop id there.
    gateway.trunk[0]->stop();
    gateway.trunk[0]->next = says(3, ids_of("a\xE2\x82"));
    gateway.trunk[0]->start();
    CHECK(client.generate(submit_text("abc", 0)).text == "a\xEF\xBF\xBD");
}

TEST_CASE("prompt and text together never exceed the context") {
    GatewayFixture gateway;
    gateway.trunk[0]->max_positions = 10;
    gateway.start();
    auto client = gateway.client();
    for (const std::uint32_t max_tokens : {0U, 8U, 100U}) {
        const Generation got = client.generate(submit_text("abc", max_tokens));
        REQUIRE_FALSE(got.error);
        CHECK(got.finished.reason == msg::FinishReason::context_full);
        CHECK(got.ids == expected_ids(*gateway.trunk[0], ids_of("abc"), 7));
    }
    CHECK(client.generate(submit_text("abc", 7)).finished.reason == msg::FinishReason::max_tokens);
    // Nothing fits behind a prompt that fills it, but it is no error.
    const Generation full = client.generate(submit_text("0123456789", 5));
    REQUIRE_FALSE(full.error);
    CHECK(full.ids.empty());
    CHECK(full.finished.reason == msg::FinishReason::context_full);
    const Generation over = client.generate(submit_text("0123456789a", 5));
    REQUIRE(over.error);
    CHECK(over.error->code == ErrorCode::invalid_argument);
}

TEST_CASE("logits come with the rows that were asked for") {
    GatewayFixture gateway;
    gateway.options.prefill_chunk = 4;
    gateway.start();
    auto client = gateway.client();
    const std::vector<std::uint32_t> prompt = ids_of("some prompt");
    msg::Submit submit = submit_ids(prompt, 3);
    const Generation none = client.generate(submit);
    CHECK(none.prompt_logits.empty());
    CHECK(none.token_logits.empty());

    std::vector<float> prompt_rows;
    std::vector<float> token_rows;
    std::vector<std::uint32_t> history;
    const auto append = [&](std::vector<float>& rows) {
        const auto row = gateway.trunk[0]->logits_after(history);
        rows.insert(rows.end(), row.begin(), row.end());
    };
    for (const std::uint32_t id : prompt) {
        history.push_back(id);
        append(prompt_rows);
    }
    for (const std::uint32_t id : none.ids) {
        append(token_rows);
        history.push_back(id);
    }
    submit.want_logits = msg::WantLogits::generated;
    const auto busy = client.submit(submit_text("something else at the same time", 20));
    const Generation generated = client.generate(submit);
    CHECK(generated.ids == none.ids);
    CHECK(generated.prompt_logits.empty());
    CHECK(generated.token_logits == token_rows);

    submit.want_logits = msg::WantLogits::all;
    const Generation all = client.generate(submit);
    CHECK(all.ids == none.ids);
    CHECK(all.prompt_logits == prompt_rows);
    CHECK(all.token_logits == token_rows);
    check_right(client.collect(busy), *gateway.trunk[0], "something else at the same time", 20);
}

TEST_CASE("logprobs come with each token when asked for") {
    GatewayFixture gateway;
    gateway.start();
    auto client = gateway.client();
    msg::Submit submit = submit_text("abc", 4);
    CHECK(client.generate(submit).logprobs.empty());
    submit.n_logprobs = 3;
    const Generation got = client.generate(submit);
    REQUIRE(got.logprobs.size() == 4);
    for (std::size_t i = 0; i < 4; ++i) {
        CHECK(got.logprobs[i].id == got.ids[i]);
        CHECK(got.logprobs[i].logprob == -0.5F);
        CHECK(got.logprobs[i].top.size() == 3);
    }
}

TEST_CASE("a sampler that takes few rows is asked several times") {
    GatewayFixture gateway;
    gateway.sampler.max_rows = 2;
    gateway.start();
    auto client = gateway.client();
    std::vector<std::uint64_t> calls;
    for (int i = 0; i < 5; ++i)
        calls.push_back(client.submit(submit_text("p" + std::to_string(i), 10)));
    for (int i = 0; i < 5; ++i)
        check_right(client.collect(calls[static_cast<std::size_t>(i)]), *gateway.trunk[0],
                    "p" + std::to_string(i), 10);
}

TEST_CASE("requests wait for their turn when the trunk holds few sessions") {
    GatewayFixture gateway;
    gateway.trunk[0]->max_sessions = 1;
    gateway.start();
    auto client = gateway.client();
    std::vector<std::uint64_t> calls;
    for (int i = 0; i < 4; ++i)
        calls.push_back(client.submit(submit_text("p" + std::to_string(i), 6)));
    for (int i = 0; i < 4; ++i)
        check_right(client.collect(calls[static_cast<std::size_t>(i)]), *gateway.trunk[0],
                    "p" + std::to_string(i), 6);
}

}  // namespace k3::gateway
