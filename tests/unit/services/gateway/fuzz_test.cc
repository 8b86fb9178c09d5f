#include <doctest/doctest.h>

#include <string>

#include "tests/support/message_fuzzer.h"
#include "tests/unit/services/gateway/gateway_fixture.h"

namespace k3::gateway {

TEST_CASE("thousands of damaged messages do not stop the gateway") {
    GatewayFixture gateway({4});
    gateway.options.max_requests = 4;
    gateway.trunk[0]->max_positions = gateway.trunk[1]->max_positions = 64;
    gateway.start();
    // Greets, so the gateway is ready from here on.
    auto client = gateway.client();
    const auto right = client.generate(test::submit_text("before and after", 8));
    REQUIRE_FALSE(right.error);

    test::FuzzOptions options;
    options.endpoint = gateway.endpoint();
    msg::Submit submit = test::submit_text("some prompt", 2);
    submit.stop_strings = {"END", "\n"};
    submit.stop_ids = {5, 6};
    submit.n_logprobs = 2;
    submit.want_logits = msg::WantLogits::all;
    options.requests.push_back({submit, {}});
    submit = test::submit_ids({1, 2, 3, 4}, 1);
    submit.params.repetition_penalty = 1.2F;
    options.requests.push_back({submit, {}});
    submit.input = msg::ChatInput{"{\"messages\": []}"};
    submit.ignore_eos = true;
    options.requests.push_back({submit, {}});
    options.requests.push_back({msg::Cancel{77}, {}});

    const test::FuzzReport report = test::fuzz_service(options);
    CHECK_MESSAGE(report.alive, report.problem);
    CHECK(report.n_sent == 2000);
    CHECK(report.n_malformed > 500);
    CHECK(report.n_failures > 0);

    const auto again = client.generate(test::submit_text("before and after", 8));
    REQUIRE_FALSE(again.error);
    CHECK(again.ids == right.ids);
    for (auto& stage : gateway.trunk)
        CHECK(GatewayFixture::eventually([&] { return stage->n_sessions() == 0; }));
}

}  // namespace k3::gateway
