#include "common/kernels/router.h"

#include <doctest/doctest.h>

#include <cmath>
#include <limits>
#include <vector>

namespace k3::kernels {

namespace {

struct Choice {
    std::vector<std::uint32_t> ids;
    std::vector<float> weights;
};

Choice choose(const RouterParams& params, const std::vector<float>& scores,
              const std::vector<float>& bias) {
    Choice choice{std::vector<std::uint32_t>(params.top_k), std::vector<float>(params.top_k)};
    std::vector<float> scratch(scores.size());
    route(params, scores, bias, scratch, choice.ids, choice.weights);
    return choice;
}

}  // namespace

TEST_CASE("the bias decides who is chosen and in which order, never the weight") {
    const Choice choice = choose({2, false, 1.0F}, {0.9F, 0.5F, 0.25F}, {-1.0F, 0.0F, 1.0F});
    CHECK(choice.ids == std::vector<std::uint32_t>{2, 1});
    CHECK(choice.weights == std::vector<float>{0.25F, 0.5F});
}

TEST_CASE("equal keys go to the lowest expert") {
    const std::vector<float> scores(8, 0.5F);
    const Choice choice = choose({3, true, 1.0F}, scores, std::vector<float>(8));
    CHECK(choice.ids == std::vector<std::uint32_t>{0, 1, 2});
    // Equal keys from unequal scores: 0.25 + 0.5 and 0.5 + 0.25.
    const Choice other = choose({1, false, 1.0F}, {0.25F, 0.5F}, {0.5F, 0.25F});
    CHECK(other.ids == std::vector<std::uint32_t>{0});
}

TEST_CASE("weights are renormalised and then scaled") {
    const Choice choice = choose({2, true, 2.5F}, {0.75F, 0.25F, 0.1F}, {0, 0, 0});
    CHECK(choice.weights == std::vector<float>{0.75F * 2.5F, 0.25F * 2.5F});
}

TEST_CASE("scores of zero give weights of zero, not NaN") {
    const Choice choice = choose({2, true, 1.0F}, {0, 0, 0}, {0, 0, 0});
    CHECK(choice.weights == std::vector<float>{0, 0});
}

TEST_CASE("all experts can be chosen, each once, whatever their keys") {
    constexpr float kInfinite = std::numeric_limits<float>::infinity();
    const Choice choice =
        choose({4, false, 1.0F}, {0.1F, 0.2F, 0.3F, 0.4F}, {-kInfinite, 0, -kInfinite, 0});
    CHECK(choice.ids == std::vector<std::uint32_t>{3, 1, 0, 2});
}

TEST_CASE("a NaN score is chosen, so that it fails the row instead of vanishing") {
    const float nan = std::numeric_limits<float>::quiet_NaN();
    const Choice choice = choose({2, true, 1.0F}, {0.9F, 0.8F, nan, 0.7F}, {0, 0, 0, 0});
    CHECK(choice.ids == std::vector<std::uint32_t>{2, 0});
    CHECK(std::isnan(choice.weights[0]));
    CHECK(std::isnan(choice.weights[1]));  // through the sum
}

}  // namespace k3::kernels
