#include "services/sampler/filters.h"

#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

namespace k3::sampler {

namespace {

constexpr double kMinusInfinity = -std::numeric_limits<double>::infinity();

/// Values whose weights at temperature 1 are 8, 4, 2, 1, 1 in units of 1/8, in shuffled ids.
std::vector<double> halves() {
    const double step = std::log(2.0);
    return {-2 * step, 0, -3 * step, -step, -3 * step};
}

std::vector<Candidate> weighed(const std::vector<double>& values, double temperature = 1) {
    std::vector<Candidate> out;
    weigh(values, temperature, out);
    return out;
}

std::vector<std::uint32_t> ids(const std::vector<Candidate>& candidates) {
    std::vector<std::uint32_t> out;
    for (const Candidate& candidate : candidates) out.push_back(candidate.id);
    return out;
}

using Ids = std::vector<std::uint32_t>;

std::vector<double> penalised(std::vector<double> values, const msg::SamplingParams& params,
                              const Ids& prompt, const Ids& generated) {
    std::vector<std::uint32_t> seen;
    apply_penalties(values, params, prompt, generated, seen);
    return values;
}

}  // namespace

TEST_CASE("repetition divides positive and multiplies other logits of seen ids, once each") {
    msg::SamplingParams params;
    params.repetition_penalty = 2;
    CHECK(penalised({4, -4, 0, 3, 8}, params, {0, 0, 1, 2}, {1, 4, 4}) ==
          std::vector<double>{2, -8, 0, 3, 4});
}

TEST_CASE("a repetition penalty below one favours repetition") {
    msg::SamplingParams params;
    params.repetition_penalty = 0.5F;
    CHECK(penalised({4, -4}, params, {0, 1}, {}) == std::vector<double>{8, -2});
}

TEST_CASE("presence counts a generated id once, frequency every time, the prompt never") {
    msg::SamplingParams params;
    params.presence_penalty = 0.5F;
    CHECK(penalised({1, 1, 1, 1}, params, {0, 0}, {1, 2, 1, 1}) ==
          std::vector<double>{1, 0.5, 0.5, 1});
    params.frequency_penalty = 0.25F;
    CHECK(penalised({1, 1, 1, 1}, params, {0, 0}, {1, 2, 1, 1}) ==
          std::vector<double>{1, -0.25, 0.25, 1});
    params.presence_penalty = -2;
    params.frequency_penalty = 0;
    CHECK(penalised({1, 1}, params, {}, {1}) == std::vector<double>{1, 3});
}

TEST_CASE("repetition comes before frequency and presence") {
    msg::SamplingParams params;
    params.repetition_penalty = 2;
    params.presence_penalty = 1;
    params.frequency_penalty = 1;
    // 6 / 2 - 2 - 1; subtracting first would give 1.5.
    CHECK(penalised({6}, params, {}, {0, 0}) == std::vector<double>{0});
}

TEST_CASE("a masked id stays masked under penalties") {
    msg::SamplingParams params;
    params.repetition_penalty = 2;
    params.presence_penalty = -2;
    CHECK(penalised({kMinusInfinity, 1}, params, {}, {0})[0] == kMinusInfinity);
}

TEST_CASE("the largest value has the lowest id among equals") {
    CHECK(argmax(std::vector<double>{1, 5, 5, 2}) == 1);
    CHECK(argmax(std::vector<double>{kMinusInfinity, -7, -7}) == 1);
}

TEST_CASE("weights are exponentials against the largest, which is exactly one") {
    const auto candidates = weighed(halves());
    REQUIRE(ids(candidates) == Ids{0, 1, 2, 3, 4});
    CHECK(candidates[1].weight == 1);
    CHECK(candidates[3].weight == doctest::Approx(0.5).epsilon(1e-12));
    CHECK(candidates[0].weight == doctest::Approx(0.25).epsilon(1e-12));
    CHECK(candidates[2].weight == doctest::Approx(0.125).epsilon(1e-12));
}

TEST_CASE("temperature divides the distance to the largest") {
    const auto hot = weighed(halves(), 2);
    CHECK(hot[1].weight == 1);
    CHECK(hot[3].weight == doctest::Approx(std::sqrt(0.5)).epsilon(1e-12));
    const auto cold = weighed(halves(), 0.5);
    CHECK(cold[3].weight == doctest::Approx(0.25).epsilon(1e-12));
}

TEST_CASE("the smallest legal temperature keeps only the largest") {
    const double tiny = std::numeric_limits<float>::denorm_min();
    CHECK(ids(weighed({0, 3, 2.9999998}, tiny)) == Ids{1});
    CHECK(ids(weighed({3, 1, 3}, tiny)) == Ids{0, 2});
}

TEST_CASE("masked ids and underflown weights are no candidates") {
    CHECK(ids(weighed({0, kMinusInfinity, -800, -1})) == Ids{0, 3});
}

TEST_CASE("top-k keeps the k largest in order of id") {
    auto candidates = weighed(halves());
    keep_top_k(candidates, 3);
    CHECK(ids(candidates) == Ids{0, 1, 3});
    keep_top_k(candidates, 1);
    CHECK(ids(candidates) == Ids{1});
}

TEST_CASE("top-k prefers the lower id among equals") {
    auto candidates = weighed(halves());
    keep_top_k(candidates, 4);
    CHECK(ids(candidates) == Ids{0, 1, 2, 3});
    candidates = weighed({1, 1, 1, 1, 1});
    keep_top_k(candidates, 2);
    CHECK(ids(candidates) == Ids{0, 1});
}

TEST_CASE("top-k of zero, of all and of more keeps everything") {
    for (const std::uint32_t k : {0U, 5U, 6U, 0xffffffffU}) {
        auto candidates = weighed(halves());
        keep_top_k(candidates, k);
        CHECK(candidates.size() == 5);
    }
}

TEST_CASE("top-p keeps the candidate that reaches the share") {
    // Cumulated shares: 8/16, 12/16, 14/16, 15/16, 1.
    const struct {
        double p;
        Ids expected;
    } cases[] = {
        {1e-9, {1}},         {0.49, {1}},          {0.51, {1, 3}},       {0.74, {1, 3}},
        {0.76, {0, 1, 3}},   {0.88, {0, 1, 2, 3}}, {0.93, {0, 1, 2, 3}}, {0.95, {0, 1, 2, 3, 4}},
        {1, {0, 1, 2, 3, 4}}};
    for (const auto& c : cases) {
        auto candidates = weighed(halves());
        keep_top_p(candidates, c.p);
        CAPTURE(c.p);
        CHECK(ids(candidates) == c.expected);
    }
}

TEST_CASE("a share that is met exactly needs no further candidate") {
    auto candidates = weighed({5, 5, 5, 5});
    keep_top_p(candidates, 0.5);
    CHECK(ids(candidates) == Ids{0, 1});
}

TEST_CASE("top-p after top-k is a share of what top-k left") {
    auto candidates = weighed(halves());
    keep_top_k(candidates, 2);     // 8 and 4 of 12
    keep_top_p(candidates, 0.66);  // 8/12 = 0.667 reaches it; of all 16 it would be 0.5
    CHECK(ids(candidates) == Ids{1});
}

TEST_CASE("top-p finds the same set however far it has to sort") {
    std::vector<double> values(5000);
    for (std::size_t i = 0; i < values.size(); ++i)
        values[i] = static_cast<double>((i * 2654435761U) % 4999) * 1e-3;
    for (const double p : {0.01, 0.2, 0.5, 0.9, 0.999, 0.9999999}) {
        auto candidates = weighed(values);
        keep_top_p(candidates, p);
        // The plain definition: sort everything, cut where the share is reached.
        auto all = weighed(values);
        double total = 0;
        for (const Candidate& candidate : all) total += candidate.weight;
        std::sort(all.begin(), all.end(), [](const Candidate& a, const Candidate& b) {
            return a.value != b.value ? a.value > b.value : a.id < b.id;
        });
        double sum = 0;
        std::size_t kept = 0;
        while (kept < all.size() && sum < p * total) sum += all[kept++].weight;
        all.resize(kept);
        std::sort(all.begin(), all.end(),
                  [](const Candidate& a, const Candidate& b) { return a.id < b.id; });
        CAPTURE(p);
        CHECK(ids(candidates) == ids(all));
    }
}

TEST_CASE("min-p keeps what has the share of the largest") {
    const struct {
        double p;
        Ids expected;
    } cases[] = {{0, {0, 1, 2, 3, 4}}, {0.1, {0, 1, 2, 3, 4}},
                 {0.2, {0, 1, 3}},     {0.3, {1, 3}},
                 {0.6, {1}},           {0.999, {1}}};
    for (const auto& c : cases) {
        auto candidates = weighed(halves());
        keep_min_p(candidates, c.p);
        CAPTURE(c.p);
        CHECK(ids(candidates) == c.expected);
    }
}

TEST_CASE("a draw takes the id whose interval holds the number") {
    const std::vector<Candidate> candidates{{3, 0, 0.25}, {7, 0, 0.5}, {9, 0, 0.25}};
    CHECK(draw(candidates, 0) == 3);
    CHECK(draw(candidates, 0.2499) == 3);
    CHECK(draw(candidates, 0.25) == 7);
    CHECK(draw(candidates, 0.7499) == 7);
    CHECK(draw(candidates, 0.75) == 9);
    CHECK(draw(candidates, 1 - 0x1p-53) == 9);
}

}  // namespace k3::sampler
