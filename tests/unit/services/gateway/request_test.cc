#include "services/gateway/request.h"

#include <doctest/doctest.h>

#include <limits>
#include <string>
#include <vector>
#include "tests/support/text.h"

namespace k3::gateway {

namespace {

PipelineFacts facts() {
    PipelineFacts out;
    out.vocab_size = 100;
    out.max_positions = 20;
    out.stop_ids = {98, 99};
    return out;
}

GenerationRequest begun(msg::Submit submit, std::vector<std::uint32_t> prompt) {
    GenerationRequest request;
    request.submit = std::move(submit);
    begin(request, std::move(prompt), facts());
    return request;
}

std::string refusal(const std::vector<std::uint32_t>& prompt,
                    const std::vector<std::uint32_t>& stop_ids = {}) {
    const Status status = check_ids(prompt, stop_ids, facts());
    REQUIRE_FALSE(status);
    CHECK(status.error().code == ErrorCode::invalid_argument);
    CHECK_FALSE(status.error().remedy.empty());
    return status.error().message;
}

}  // namespace

TEST_CASE("prompts are refused with the numbers that speak against them") {
    CHECK(test::contains(refusal({}), "0 ids"));
    const std::string too_long = refusal(std::vector<std::uint32_t>(21, 1));
    CHECK(test::contains(too_long, "21"));
    CHECK(test::contains(too_long, "20"));
    const std::string outside = refusal({1, 2, 100, 3});
    CHECK(test::contains(outside, "id 100"));
    CHECK(test::contains(outside, "position 2"));
    CHECK(test::contains(outside, "vocabulary of 100"));
    CHECK(test::contains(refusal({1}, {5, 4000000000U}), "stop id 4000000000 at position 1"));
    CHECK(check_ids(std::vector<std::uint32_t>(20, 99), {0}, facts()));
}

TEST_CASE("a submit is refused before any stage is asked") {
    const auto message = [](const msg::Submit& submit) {
        const Status status = check_submit(submit);
        REQUIRE_FALSE(status);
        CHECK(status.error().code == ErrorCode::invalid_argument);
        return status.error().message;
    };
    msg::Submit submit;
    CHECK(check_submit(submit));
    submit.params.temperature = std::numeric_limits<float>::quiet_NaN();
    CHECK(test::contains(message(submit), "temperature"));
    submit = {};
    submit.n_logprobs = 21;
    CHECK(test::contains(message(submit), "n_logprobs 21"));
    submit = {};
    submit.stop_strings = std::vector<std::string>(17, "x");
    CHECK(test::contains(message(submit), "17"));
    submit.stop_strings = {"a", ""};
    CHECK(test::contains(message(submit), "stop string 1 has 0 bytes"));
    submit.stop_strings = {std::string(4097, 'x')};
    CHECK(test::contains(message(submit), "4097"));
    submit.stop_strings = std::vector<std::string>(16, std::string(4096, 'x'));
    CHECK(check_submit(submit));
}

TEST_CASE("the model's stop ids stop unless they are to be ignored") {
    msg::Submit submit;
    submit.stop_ids = {5};
    CHECK(begun(submit, {1}).stop_ids == std::vector<std::uint32_t>{5, 98, 99});
    submit.ignore_eos = true;
    CHECK(begun(submit, {1}).stop_ids == std::vector<std::uint32_t>{5});
}

TEST_CASE("a session reserves prompt and answer within the context") {
    msg::Submit submit;
    submit.max_tokens = 5;
    CHECK(positions_to_reserve(begun(submit, {1, 2, 3})) == 8);
    submit.max_tokens = 0xFFFFFFFFU;
    CHECK(positions_to_reserve(begun(submit, {1, 2, 3})) == 20);
    submit.max_tokens = 0;
    CHECK(positions_to_reserve(begun(submit, {1, 2, 3})) == 20);
}

TEST_CASE("histories are sent only when a penalty reads them") {
    GenerationRequest request = begun({}, {1, 2, 3});
    request.ids.insert(request.ids.end(), {7, 8});
    CHECK(sample_row_of(request).step_index == 2);
    CHECK(sample_row_of(request).prompt_ids.empty());
    CHECK(sample_row_of(request).generated_ids.empty());
    request.submit.params.presence_penalty = 0.5F;
    CHECK(sample_row_of(request).prompt_ids.empty());
    CHECK(sample_row_of(request).generated_ids == std::vector<std::uint32_t>{7, 8});
    request.submit.params = {};
    request.submit.params.frequency_penalty = 0.5F;
    CHECK(sample_row_of(request).generated_ids == std::vector<std::uint32_t>{7, 8});
    request.submit.params = {};
    request.submit.params.repetition_penalty = 1.1F;
    CHECK(sample_row_of(request).prompt_ids == std::vector<std::uint32_t>{1, 2, 3});
    CHECK(sample_row_of(request).generated_ids == std::vector<std::uint32_t>{7, 8});
}

TEST_CASE("limits end a request, the token limit before the context") {
    msg::Submit submit;
    submit.max_tokens = 2;
    GenerationRequest request = begun(submit, std::vector<std::uint32_t>(18, 1));
    CHECK_FALSE(limit_reached(request));
    request.ids.push_back(1);
    CHECK_FALSE(limit_reached(request));
    request.ids.push_back(1);
    CHECK(limit_reached(request) == msg::FinishReason::max_tokens);
    request.submit.max_tokens = 3;
    CHECK(limit_reached(request) == msg::FinishReason::context_full);
    request.submit.max_tokens = 0;
    CHECK(limit_reached(request) == msg::FinishReason::context_full);
}

TEST_CASE("a request needs the ids it has not fed, and knows which belong to the prompt") {
    msg::Submit submit;
    submit.want_logits = msg::WantLogits::all;
    GenerationRequest request = begun(submit, {1, 2, 3});
    request.n_fed = 1;
    Need need = need_of(request);
    CHECK(need.position == 1);
    CHECK(need.ids.size() == 2);
    CHECK(need.n_prompt_left == 2);
    CHECK(need.want_all);
    request.n_fed = 3;
    request.ids.push_back(9);
    need = need_of(request);
    CHECK(need.ids.size() == 1);
    CHECK(need.ids[0] == 9);
    CHECK(need.n_prompt_left == 0);
    CHECK_FALSE(need.want_all);
}

}  // namespace k3::gateway
