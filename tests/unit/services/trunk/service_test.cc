// A trunk stage behind a real server and channel: sessions, steps, refusals, shared memory.

#include "services/trunk/service.h"

#include <doctest/doctest.h>

#include <limits>
#include <string>
#include <vector>

#include "common/transport/tensor_io.h"
#include "tests/support/text.h"
#include "tests/unit/services/trunk/harness.h"
#include "tests/unit/services/trunk/served_stage.h"

namespace k3::test {

namespace {

msg::Step tokens(std::uint64_t session, std::uint64_t position,
                 const std::vector<std::uint32_t>& ids, bool reply_shm = false) {
    msg::Step step;
    for (std::uint32_t id : ids) step.rows.push_back({session, position++, id});
    step.want = {static_cast<std::uint32_t>(ids.size() - 1)};
    step.reply_shm = reply_shm;
    return step;
}

/// A step of all its rows with the output of the stage before.
msg::Step rows_of(const msg::Step& first, const std::vector<float>& rows, std::uint64_t n_vectors,
                  std::vector<msg::Bytes>& frames) {
    msg::Step step = first;
    step.hidden = transport::put_tensor(
        msg::DType::f32, {first.rows.size(), n_vectors, tiny_model().config.hidden_size},
        std::as_bytes(std::span(rows)), nullptr, false, frames);
    return step;
}

std::vector<float> expected_logits(const std::vector<std::uint32_t>& ids) {
    Harness trunk(tiny_model());
    trunk.open(1);
    std::vector<float> all = trunk.feed(1, ids, ids.size());
    return {all.end() - static_cast<std::ptrdiff_t>(trunk.vocab_size()), all.end()};
}

}  // namespace

TEST_CASE("a served stage gives the logits of the stage itself, inline and through shared memory") {
    const std::vector<std::uint32_t> ids = {387, 486, 344, 495, 13};
    for (bool use_shm : {false, true}) {
        ServedStage stage({0, 13}, use_shm);
        CHECK(stage.facts().in_vectors == 0);
        CHECK(stage.facts().out_vectors == 0);
        CHECK(stage.facts().vocab_size == 768);
        CHECK(stage.facts().max_step_rows == 16);
        stage.open(9);
        REQUIRE(stage.step(tokens(9, 0, {387, 486}, use_shm)).has_value());
        const auto logits = stage.step(tokens(9, 2, {344, 495, 13}, use_shm));
        REQUIRE(logits.has_value());
        CHECK(*logits == expected_logits(ids));
        CHECK(stage.is_shm() == use_shm);
        CHECK(stage.count("steps") == 2);
        CHECK(stage.count("step_rows") == 5);
        CHECK(stage.count("open_sessions") == 1);
    }
}

TEST_CASE("two served stages hand rows on and give the same logits") {
    const std::vector<std::uint32_t> ids = {387, 486, 344, 495, 13};
    ServedStage first({0, 7}, false);
    ServedStage second({7, 6}, false);
    CHECK(first.facts().out_vectors == 4);
    CHECK(second.facts().in_vectors == 4);
    for (ServedStage* stage : {&first, &second}) stage->open(3);
    const msg::Step step = tokens(3, 0, ids);
    const auto rows = first.step(step);
    REQUIRE(rows.has_value());
    std::vector<msg::Bytes> frames;
    const msg::Step next = rows_of(step, *rows, 4, frames);
    const auto logits = second.step(next, frames);
    REQUIRE(logits.has_value());
    CHECK(*logits == expected_logits(ids));
}

TEST_CASE("a fork over messages goes on from its own copy") {
    ServedStage stage({0, 13}, false);
    stage.open(1);
    REQUIRE(stage.step(tokens(1, 0, {387, 486, 344})).has_value());
    REQUIRE(stage.ask(msg::ForkSession{1, 2, 20}).has_value());
    REQUIRE(stage.step(tokens(1, 3, {5})).has_value());
    CHECK(stage.step(tokens(2, 3, {495, 13})).value() == expected_logits({387, 486, 344, 495, 13}));
    REQUIRE(stage.ask(msg::DropSession{1}).has_value());
    REQUIRE(stage.ask(msg::DropSession{1}).has_value());
    CHECK(stage.refusal(tokens(1, 4, {5})).code == ErrorCode::not_found);
}

TEST_CASE("a step that wants nothing answers without a tensor") {
    ServedStage stage({0, 13}, true);
    stage.open(1);
    msg::Step step = tokens(1, 0, {387, 486}, true);
    step.want.clear();
    const auto reply = stage.ask(step);
    REQUIRE(reply.has_value());
    CHECK(std::get<msg::StepResult>(reply->body).output.empty());
    CHECK(stage.step(tokens(1, 2, {344, 495, 13})).value() ==
          expected_logits({387, 486, 344, 495, 13}));
}

TEST_CASE("steps that cannot be meant are refused with the numbers, and touch nothing") {
    ServedStage stage({0, 13}, false);
    stage.open(1, 8);
    stage.open(2, 8);
    REQUIRE(stage.step(tokens(1, 0, {387, 486})).has_value());
    const auto refused = [&](const msg::Step& step, ErrorCode code, const std::string& part) {
        const Error error = stage.refusal(step);
        CAPTURE(error.message);
        CHECK(error.code == code);
        CHECK(contains(error.message, part));
    };
    refused({}, ErrorCode::invalid_argument, "a step of 0 rows");
    refused(tokens(1, 2, std::vector<std::uint32_t>(17, 5)), ErrorCode::invalid_argument,
            "takes 1 to 16");
    refused(tokens(77, 0, {5}), ErrorCode::not_found, "session 77");
    refused(tokens(1, 3, {5}), ErrorCode::stale, "next position is 2");
    refused(tokens(1, 1, {5}), ErrorCode::stale, "next position is 2");
    refused(tokens(1, std::numeric_limits<std::uint64_t>::max(), {5}), ErrorCode::stale, "2");
    refused(tokens(1, 2, {5, 6, 7, 8, 9, 10, 11}), ErrorCode::resource_exhausted, "8 positions");
    refused(tokens(1, 2, {768}), ErrorCode::invalid_argument, "token 768");
    refused(tokens(1, 2, {5, tiny_model().config.media_placeholder_id}), ErrorCode::unsupported,
            "image");
    msg::Step doubled = tokens(1, 2, {5, 6});
    doubled.rows[1].position = 2;
    refused(doubled, ErrorCode::stale, "next position is 3");
    msg::Step want = tokens(1, 2, {5, 6});
    want.want = {2};
    refused(want, ErrorCode::invalid_argument, "want[0] is 2");
    want.want = {1, 1};
    refused(want, ErrorCode::invalid_argument, "want[1] is 1");
    want.want = {1, 0};
    refused(want, ErrorCode::invalid_argument, "want[1] is 0");
    // A good row of another session in the same step is not taken either.
    msg::Step mixed = tokens(2, 0, {387});
    mixed.rows.push_back({1, 9, 5});
    refused(mixed, ErrorCode::stale, "session 1");

    CHECK(stage.step(tokens(1, 2, {344, 495, 13})).value() ==
          expected_logits({387, 486, 344, 495, 13}));
    CHECK(stage.step(tokens(2, 0, {387, 486, 344})).has_value());
    CHECK(stage.count("refused_requests") == 14);
    CHECK(stage.count("failed_steps") == 0);
}

TEST_CASE("rows of another stage are checked for presence, shape and numbers") {
    ServedStage first({0, 7}, false);
    ServedStage second({7, 6}, false);
    first.open(1);
    second.open(1);
    const msg::Step step = tokens(1, 0, {387, 486});
    CHECK(contains(second.refusal(step).message, "hidden"));
    const std::vector<float> rows(2 * 4 * 80, 0.5F);
    std::vector<msg::Bytes> frames;
    msg::Step wrong = rows_of(step, rows, 4, frames);
    CHECK(contains(first.refusal(wrong, frames).message, "takes tokens"));
    wrong.hidden.shape = {2, 80, 4};
    CHECK(second.refusal(wrong, frames).code == ErrorCode::invalid_argument);
    wrong.hidden.shape = {2, 4, 80};
    CHECK(second.refusal(wrong, {}).code == ErrorCode::invalid_argument);
    CHECK(second.refusal(wrong, {msg::Bytes(12)}).code == ErrorCode::invalid_argument);
    wrong.hidden.payload = msg::ShmPayload{"/k3-no-such-segment", 0, 2560, 2};
    CHECK(second.refusal(wrong).code == ErrorCode::not_found);

    std::vector<float> infinite = rows;
    infinite[5 * 80] = std::numeric_limits<float>::infinity();
    std::vector<msg::Bytes> infinite_frames;
    const msg::Step bad = rows_of(step, infinite, 4, infinite_frames);
    const Error error = second.refusal(bad, infinite_frames);
    CHECK(error.code == ErrorCode::corrupt);
    CHECK(contains(error.message, "row 1 (session 1, position 1)"));
    // The session is as it was.
    std::vector<msg::Bytes> good_frames;
    const msg::Step good = rows_of(step, first.step(step).value(), 4, good_frames);
    CHECK(second.step(good, good_frames).value() == expected_logits({387, 486}));
}

TEST_CASE("a failed step answers its cause and leaves the session unusable until dropped") {
    ServedStage stage({0, 13}, false);
    stage.open(1);
    stage.experts().fault = [](std::uint32_t) -> Status {
        return Error{ErrorCode::corrupt, "layer 1 expert 7: scale byte 255", "restore the file"};
    };
    const Error first = stage.refusal(tokens(1, 0, {5}));
    CHECK(first.code == ErrorCode::corrupt);
    CHECK(contains(first.message, "layer 1 expert 7: scale byte 255"));
    stage.experts().fault = nullptr;
    const Error second = stage.refusal(tokens(1, 0, {5}));
    CHECK(second.code == ErrorCode::unavailable);
    CHECK(contains(second.message, "scale byte 255"));
    REQUIRE(stage.ask(msg::DropSession{1}).has_value());
    stage.open(1);
    CHECK(stage.step(tokens(1, 0, {387, 486})).value() == expected_logits({387, 486}));
    CHECK(stage.count("failed_steps") == 1);
}

TEST_CASE("sessions are bounded in number and memory over messages") {
    ServedStage stage({0, 13}, false);
    CHECK(stage.refusal(msg::OpenSession{1, 4000}).code == ErrorCode::resource_exhausted);
    CHECK(stage.refusal(msg::OpenSession{0, 4}).code == ErrorCode::invalid_argument);
    CHECK(stage.refusal(msg::OpenSession{1, std::uint64_t{1} << 60U}).code ==
          ErrorCode::resource_exhausted);
    for (std::uint64_t id = 1; id <= 4; ++id) stage.open(id);
    CHECK(contains(stage.refusal(msg::OpenSession{5, 4}).message, "4 of 4 sessions"));
    CHECK(stage.refusal(msg::ForkSession{1, 5, 4}).code == ErrorCode::resource_exhausted);
}

TEST_CASE("messages of other conversations get unsupported") {
    ServedStage stage({0, 13}, false);
    CHECK(stage.refusal(msg::Sample{}).code == ErrorCode::unsupported);
    CHECK(stage.refusal(msg::ExpertCall{}).code == ErrorCode::unsupported);
}

TEST_CASE("layers are parsed as all, a range or one, and anything else names the legal range") {
    const auto& config = tiny_model().config;
    CHECK(trunk::parse_layers("all", config).value().count == 13);
    CHECK(trunk::parse_layers("3-7", config).value().first == 3);
    CHECK(trunk::parse_layers("3-7", config).value().count == 5);
    CHECK(trunk::parse_layers("12", config).value().count == 1);
    for (const char* bad :
         {"", "7-3", "0-13", "13", "-1", "a-b", "3-", "1-2-3", "0x1", " 1", "99999999999"}) {
        CAPTURE(bad);
        const auto range = trunk::parse_layers(bad, config);
        REQUIRE(!range.has_value());
        CHECK(range.error().code == ErrorCode::invalid_argument);
        CHECK(contains(range.error().message, "0-12"));
    }
}

}  // namespace k3::test
