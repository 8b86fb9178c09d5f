// Thousands of damaged messages at a first and at a later stage: each gets an error or an answer,
// and afterwards the stage still computes the right bytes.

#include <doctest/doctest.h>

#include <vector>

#include "common/transport/tensor_io.h"
#include "tests/support/message_fuzzer.h"
#include "tests/unit/services/trunk/served_stage.h"

namespace k3::test {

namespace {

msg::Step two_rows(std::uint64_t session) {
    msg::Step step;
    step.rows = {{session, 0, 387}, {session, 1, 486}};
    step.want = {1};
    return step;
}

void fuzz(ServedStage& stage, std::vector<FuzzRequest> steps) {
    FuzzOptions options;
    options.endpoint = stage.endpoint();
    options.requests = {
        {msg::OpenSession{5, 8}, {}}, {msg::ForkSession{5, 6, 8}, {}}, {msg::DropSession{5}, {}}};
    options.requests.insert(options.requests.end(), steps.begin(), steps.end());
    const FuzzReport report = fuzz_service(options);
    CHECK_MESSAGE(report.alive, report.problem);
    CHECK(report.n_sent >= 2000);
    CHECK(report.n_malformed > 500);
    CHECK(report.n_failures > 0);
    for (std::uint64_t id = 1; id < 10; ++id) REQUIRE(stage.ask(msg::DropSession{id}).has_value());
}

}  // namespace

TEST_CASE("2000 damaged messages leave a first stage alive and right") {
    ServedStage stage({0, 13}, true);
    stage.open(4);
    const std::vector<float> before = stage.step(two_rows(4)).value();
    fuzz(stage, {{two_rows(5), {}}});
    stage.open(4);
    CHECK(stage.step(two_rows(4)).value() == before);
}

TEST_CASE("2000 damaged messages leave a later stage alive and right") {
    ServedStage stage({7, 6}, true);
    std::vector<msg::Bytes> frames;
    const std::vector<float> rows(2 * 4 * 80, 0.25F);
    msg::Step step = two_rows(5);
    step.hidden = transport::put_tensor(msg::DType::f32, {2, 4, 80}, std::as_bytes(std::span(rows)),
                                        nullptr, false, frames);
    stage.open(5);
    const std::vector<float> before = stage.step(step, frames).value();
    fuzz(stage, {{step, frames}});
    stage.open(5);
    CHECK(stage.step(step, frames).value() == before);
}

}  // namespace k3::test
