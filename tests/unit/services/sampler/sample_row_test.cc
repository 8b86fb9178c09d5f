#include "services/sampler/sample_row.h"

#include <doctest/doctest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <functional>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "services/sampler/distribution.h"

namespace k3::sampler {

namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

using Ids = std::vector<std::uint32_t>;

msg::SampledRow sampled(const std::vector<float>& logits, const msg::SampleRow& row) {
    Workspace workspace;
    REQUIRE(check_row(row, 0, logits.size()));
    auto result = sample_row(logits, row, 0, workspace);
    REQUIRE(result);
    return *result;
}

msg::SampleRow greedy() {
    msg::SampleRow row;
    row.params.temperature = 0;
    return row;
}

/// A bumpy row without ties, made by integer arithmetic.
std::vector<float> bumpy(std::size_t n, std::uint32_t salt) {
    std::vector<float> out(n);
    std::uint32_t x = salt;
    for (float& v : out) {
        x = x * 1664525U + 1013904223U;
        v = static_cast<float>(x >> 8U) / 16777216.0F * 12.0F - 6.0F;
    }
    return out;
}

Ids sequence(const std::vector<float>& logits, msg::SampleRow row, std::size_t n) {
    Workspace workspace;
    Ids out;
    for (row.step_index = 0; row.step_index < n; ++row.step_index)
        out.push_back(sample_row(logits, row, 0, workspace).value().id);
    return out;
}

}  // namespace

TEST_CASE("temperature zero takes the largest logit, the lowest id among equals") {
    CHECK(sampled({1, 7, 3, 7}, greedy()).id == 1);
    CHECK(sampled({-kInfinity, -5, -kInfinity, -5}, greedy()).id == 1);
}

TEST_CASE("temperature zero takes the largest logit after penalties") {
    msg::SampleRow row = greedy();
    row.params.presence_penalty = 2;
    row.generated_ids = {1};
    CHECK(sampled({1, 7, 6, 5}, row).id == 2);
    row.params.presence_penalty = 1;  // a tie with id 2 now
    CHECK(sampled({1, 7, 6, 5}, row).id == 1);
}

TEST_CASE("temperature zero ignores the seed and the step") {
    msg::SampleRow row = greedy();
    const auto logits = bumpy(512, 3);
    const std::uint32_t id = sampled(logits, row).id;
    for (row.params.seed = 0; row.params.seed < 20; ++row.params.seed) {
        row.step_index = row.params.seed * 31;
        CHECK(sampled(logits, row).id == id);
    }
}

TEST_CASE("logprobs are those of the raw distribution whatever the filters do") {
    // Probabilities 1/2, 1/4, 1/8, 1/8.
    const float step = std::log(2.0F);
    const std::vector<float> logits{-step, 0, -2 * step, -2 * step};
    msg::SampleRow row;
    row.params.temperature = 0.3F;
    row.params.top_k = 1;
    row.params.presence_penalty = 2;
    row.params.repetition_penalty = 3;
    row.generated_ids = {1};
    row.prompt_ids = {1};
    row.n_logprobs = 3;
    const auto out = sampled(logits, row);
    CHECK(out.id == 0);
    CHECK(out.logprob == doctest::Approx(std::log(0.25)));
    REQUIRE(out.top.size() == 3);
    CHECK(out.top[0].id == 1);
    CHECK(out.top[0].logprob == doctest::Approx(std::log(0.5)));
    CHECK(out.top[1].id == 0);
    CHECK(out.top[2].id == 2);  // equal to 3, lower id
    CHECK(out.top[2].logprob == doctest::Approx(std::log(0.125)));
}

TEST_CASE("probabilities of a large vocabulary add up to one") {
    const auto logits = bumpy(163840, 11);
    const Distribution distribution = inspect(logits, 0).value();
    double sum = 0;
    for (std::uint32_t id = 0; id < logits.size(); ++id)
        sum += std::exp(double{logprob(logits, distribution, id)});
    CHECK(sum == doctest::Approx(1).epsilon(1e-5));
}

TEST_CASE("alternatives are at most the vocabulary and leave out masked ids") {
    msg::SampleRow row = greedy();
    row.n_logprobs = 20;
    const auto out = sampled({3, -kInfinity, 5}, row);
    REQUIRE(out.top.size() == 2);
    CHECK(out.top[0].id == 2);
    CHECK(out.top[1].id == 0);
}

TEST_CASE("alternatives are the first of the full sorted list") {
    auto logits = bumpy(3000, 5);
    logits[17] = logits[2900] = 6.5F;  // a tie at the top
    msg::SampleRow row = greedy();
    row.n_logprobs = 20;
    const auto out = sampled(logits, row);
    std::vector<std::uint32_t> order(logits.size());
    for (std::uint32_t i = 0; i < order.size(); ++i) order[i] = i;
    std::sort(order.begin(), order.end(), [&](std::uint32_t a, std::uint32_t b) {
        return logits[a] != logits[b] ? logits[a] > logits[b] : a < b;
    });
    REQUIRE(out.top.size() == 20);
    for (std::size_t i = 0; i < 20; ++i) CHECK(out.top[i].id == order[i]);
}

TEST_CASE("a stop id is reported as one") {
    msg::SampleRow row = greedy();
    row.stop_ids = {5, 2};
    CHECK(sampled({0, 0, 9, 0, 0, 0}, row).is_stop);
    CHECK_FALSE(sampled({0, 9, 0, 0, 0, 0}, row).is_stop);
}

TEST_CASE("draws follow the distribution") {
    // Chi-square against exact probabilities; 30.7 bounds 9,999 of 10,000 cases at 8 degrees.
    const std::array<double, 9> shares{0.30, 0.20, 0.15, 0.10, 0.09, 0.07, 0.05, 0.03, 0.01};
    std::vector<float> logits;
    for (const double share : shares) logits.push_back(static_cast<float>(std::log(share)) + 3);
    msg::SampleRow row;
    row.params.seed = 42;
    constexpr std::size_t kDraws = 40000;
    std::array<double, 9> counts{};
    for (const std::uint32_t id : sequence(logits, row, kDraws)) counts.at(id) += 1;
    double chi_square = 0;
    for (std::size_t i = 0; i < shares.size(); ++i) {
        const double expected = shares.at(i) * kDraws;
        chi_square += (counts.at(i) - expected) * (counts.at(i) - expected) / expected;
    }
    CHECK(chi_square < 30.7);
}

TEST_CASE("draws follow the filtered and heated distribution") {
    // Shares at temperature 1: 8, 4, 2, 1, 1. At 0.5 squared: 64, 16, 4, 1, 1. Top-k 3 leaves 84.
    const float step = std::log(2.0F);
    const std::vector<float> logits{-2 * step, 0, -3 * step, -step, -3 * step};
    msg::SampleRow row;
    row.params.temperature = 0.5F;
    row.params.top_k = 3;
    row.params.seed = 7;
    constexpr std::size_t kDraws = 21000;
    std::array<double, 5> counts{};
    for (const std::uint32_t id : sequence(logits, row, kDraws)) counts.at(id) += 1;
    CHECK(counts[2] == 0);
    CHECK(counts[4] == 0);
    double chi_square = 0;
    for (const auto& [id, share] : {std::pair{1, 64.0}, {3, 16.0}, {0, 4.0}}) {
        const double expected = share / 84 * kDraws;
        const double difference = counts.at(static_cast<std::size_t>(id)) - expected;
        chi_square += difference * difference / expected;
    }
    CHECK(chi_square < 18.4);  // 9,999 of 10,000 cases at 2 degrees of freedom
}

TEST_CASE("a filter that is off changes no draw") {
    const auto logits = bumpy(1000, 9);
    msg::SampleRow row;
    row.params.seed = 99;
    const Ids plain = sequence(logits, row, 200);
    row.params.top_k = 1000;
    CHECK(sequence(logits, row, 200) == plain);
    row.params.top_k = 999999;
    CHECK(sequence(logits, row, 200) == plain);
    row.params.top_k = 0;
    row.prompt_ids = {1, 2, 3};
    row.generated_ids = {4};
    CHECK(sequence(logits, row, 200) == plain);
}

TEST_CASE("scratch space carries nothing from one row to the next") {
    const auto wide = bumpy(2000, 1);
    const auto narrow = bumpy(50, 2);
    msg::SampleRow row;
    row.params.seed = 5;
    row.params.top_p = 0.9F;
    row.params.repetition_penalty = 1.3F;
    row.generated_ids = {3, 4, 4};
    const std::uint32_t alone = sampled(narrow, row).id;
    Workspace workspace;
    (void)sample_row(wide, row, 0, workspace).value();
    CHECK(sample_row(narrow, row, 1, workspace).value().id == alone);
}

TEST_CASE("a fixed seed gives the committed sequence") {
    // Computed by a second implementation (plain sorts, libm) from the same definition.
    const auto logits = bumpy(640, 20261129);
    msg::SampleRow row;
    row.params.seed = 1234567890123456789ULL;
    SUBCASE("plain") {
        CHECK(sequence(logits, row, 16) ==
              Ids{406, 604, 511, 112, 296, 623, 367, 393, 576, 593, 448, 51, 256, 68, 224, 7});
    }
    SUBCASE("all filters") {
        row.params.temperature = 1.7F;
        row.params.top_k = 100;
        row.params.top_p = 0.92F;
        row.params.min_p = 0.02F;
        row.params.repetition_penalty = 1.2F;
        row.params.presence_penalty = 0.4F;
        row.params.frequency_penalty = 0.3F;
        row.prompt_ids = {1, 5, 9, 200, 333};
        row.generated_ids = {7, 7, 7, 61, 500, 639};
        CHECK(sequence(logits, row, 16) ==
              Ids{408, 603, 515, 151, 319, 623, 390, 406, 577, 589, 461, 78, 275, 106, 231, 15});
    }
}

TEST_CASE("a row that is not sound gives an error naming row and id, never a token") {
    Workspace workspace;
    const auto error_of = [&](const std::vector<float>& logits) {
        auto result = sample_row(logits, greedy(), 3, workspace);
        REQUIRE_FALSE(result);
        CHECK(result.error().code == ErrorCode::corrupt);
        CHECK(result.error().message.find("row 3") != std::string::npos);
        CHECK_FALSE(result.error().remedy.empty());
        return result.error().message;
    };
    CHECK(error_of({1, 2, kNan, 4}).find("nan at id 2") != std::string::npos);
    CHECK(error_of({kInfinity, 2}).find("inf at id 0") != std::string::npos);
    CHECK(error_of({-kInfinity, -kInfinity, -kInfinity}).find("id from 0 to 2") !=
          std::string::npos);
    // Also behind the largest, where an argmax alone would not look.
    CHECK(error_of({9, 2, 1, kNan}).find("id 3") != std::string::npos);
}

TEST_CASE("parameters outside their range are refused by name") {
    using Change = std::function<void(msg::SampleRow&)>;
    const struct {
        std::string name;
        Change change;
    } cases[] = {
        {"temperature", [](auto& r) { r.params.temperature = -0.1F; }},
        {"temperature", [](auto& r) { r.params.temperature = 10.1F; }},
        {"temperature", [](auto& r) { r.params.temperature = kNan; }},
        {"temperature", [](auto& r) { r.params.temperature = kInfinity; }},
        {"top_p", [](auto& r) { r.params.top_p = 0; }},
        {"top_p", [](auto& r) { r.params.top_p = 1.01F; }},
        {"top_p", [](auto& r) { r.params.top_p = kNan; }},
        {"min_p", [](auto& r) { r.params.min_p = -0.01F; }},
        {"min_p", [](auto& r) { r.params.min_p = 1; }},
        {"min_p", [](auto& r) { r.params.min_p = kNan; }},
        {"repetition_penalty", [](auto& r) { r.params.repetition_penalty = 0; }},
        {"repetition_penalty", [](auto& r) { r.params.repetition_penalty = 10.5F; }},
        {"repetition_penalty", [](auto& r) { r.params.repetition_penalty = kNan; }},
        {"presence_penalty", [](auto& r) { r.params.presence_penalty = 2.1F; }},
        {"presence_penalty", [](auto& r) { r.params.presence_penalty = kNan; }},
        {"frequency_penalty", [](auto& r) { r.params.frequency_penalty = -2.1F; }},
        {"frequency_penalty", [](auto& r) { r.params.frequency_penalty = -kInfinity; }},
        {"n_logprobs", [](auto& r) { r.n_logprobs = 21; }},
        {"prompt_ids[1]",
         [](auto& r) {
             r.prompt_ids = {0, 100};
         }},
        {"generated_ids[0]", [](auto& r) { r.generated_ids = {4000000000U}; }},
        {"stop_ids[2]",
         [](auto& r) {
             r.stop_ids = {1, 2, 100};
         }},
    };
    for (const auto& c : cases) {
        msg::SampleRow row;
        c.change(row);
        const Status status = check_row(row, 4, 100);
        CAPTURE(c.name);
        REQUIRE_FALSE(status);
        CHECK(status.error().code == ErrorCode::invalid_argument);
        CHECK(status.error().message.find("row 4: " + c.name) == 0);
        CHECK_FALSE(status.error().remedy.empty());
    }
}

TEST_CASE("parameters at the ends of their ranges are legal") {
    msg::SampleRow row;
    row.params.temperature = 10;
    row.params.top_p = 1;
    row.params.min_p = 0.999F;
    row.params.repetition_penalty = 10;
    row.params.presence_penalty = -2;
    row.params.frequency_penalty = 2;
    row.params.top_k = 0xffffffffU;
    row.params.seed = ~0ULL;
    row.n_logprobs = 20;
    row.stop_ids = {99};
    row.generated_ids = {99};
    CHECK(check_row(row, 0, 100));
    CHECK(sampled(bumpy(100, 1), row).id < 100);
}

TEST_CASE("extreme logits stay drawable") {
    const float max = std::numeric_limits<float>::max();
    msg::SampleRow row;
    row.params.temperature = std::numeric_limits<float>::denorm_min();
    CHECK(sampled({-max, max, 0}, row).id == 1);
    row.params.temperature = 10;
    CHECK(sampled({-max, max, 0}, row).id == 1);
    row.params.repetition_penalty = 0.01F;
    row.params.frequency_penalty = 2;
    row.generated_ids = {0, 1, 2};
    CHECK(sampled({-max, max, 0}, row).id == 1);
    row.generated_ids = {0};
    CHECK(sampled({5}, row).id == 0);
}

}  // namespace k3::sampler
