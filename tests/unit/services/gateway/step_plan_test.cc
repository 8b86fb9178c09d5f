#include "services/gateway/step_plan.h"

#include <doctest/doctest.h>

#include <algorithm>
#include <cstdint>
#include <numeric>
#include <vector>

namespace k3::gateway {

namespace {

const std::vector<std::uint32_t>& numbers() {
    static const std::vector<std::uint32_t> out = [] {
        std::vector<std::uint32_t> v(1000);
        std::iota(v.begin(), v.end(), 0U);
        return v;
    }();
    return out;
}

/// A prompt of `n` ids from `position` on.
Need prompt(std::uint64_t session, std::size_t position, std::size_t n, bool want_all = false) {
    return {session, position, std::span(numbers()).subspan(position, n), n, want_all};
}

Need generating(std::uint64_t session, std::size_t position) {
    return {session, position, std::span(numbers()).subspan(position, 1), 0, false};
}

}  // namespace

TEST_CASE("a request that generates gets its one row, and its logits") {
    const std::vector<Need> needs{generating(7, 42)};
    const StepPlan plan = plan_step(needs, {8, 4, 64}, 0);
    REQUIRE(plan.rows.size() == 1);
    CHECK(plan.rows[0].session == 7);
    CHECK(plan.rows[0].position == 42);
    CHECK(plan.rows[0].token == 42);
    CHECK(plan.want == std::vector<std::uint32_t>{0});
    REQUIRE(plan.shares.size() == 1);
    CHECK(plan.shares[0].complete);
    CHECK(plan.shares[0].n_want == 1);
}

TEST_CASE("a prompt is cut into chunks, and only its end wants logits") {
    const std::vector<Need> first{prompt(1, 0, 10)};
    const StepPlan begin = plan_step(first, {100, 4, 64}, 0);
    CHECK(begin.rows.size() == 4);
    CHECK(begin.want.empty());
    CHECK_FALSE(begin.shares[0].complete);

    const std::vector<Need> last{prompt(1, 8, 2)};
    const StepPlan end = plan_step(last, {100, 4, 64}, 0);
    REQUIRE(end.rows.size() == 2);
    CHECK(end.rows[1].position == 9);
    CHECK(end.want == std::vector<std::uint32_t>{1});
    CHECK(end.shares[0].complete);
}

TEST_CASE("requests that generate go before prompts") {
    const std::vector<Need> needs{prompt(1, 0, 50), generating(2, 9), prompt(3, 5, 3),
                                  generating(4, 1)};
    const StepPlan plan = plan_step(needs, {100, 16, 64}, 0);
    REQUIRE(plan.rows.size() == 2 + 16 + 3);
    CHECK(plan.rows[0].session == 2);
    CHECK(plan.rows[1].session == 4);
    CHECK(plan.rows[2].session == 1);
    CHECK(plan.rows[18].session == 3);
    CHECK(plan.want == std::vector<std::uint32_t>{0, 1, 20});
    REQUIRE(plan.shares.size() == 4);
    CHECK(plan.shares[0].request == 1);
    CHECK(plan.shares[2].request == 0);
    CHECK(plan.shares[3].first_want == 2);
}

TEST_CASE("a step never has more rows than the trunk takes") {
    const std::vector<Need> needs{prompt(1, 0, 50), prompt(2, 0, 50), generating(3, 0)};
    for (std::size_t max_rows = 1; max_rows < 40; ++max_rows) {
        const StepPlan plan = plan_step(needs, {max_rows, 16, 64}, max_rows);
        CHECK(plan.rows.size() == std::min<std::size_t>(max_rows, 33));
        CHECK(plan.rows[0].session == 3);
    }
}

TEST_CASE("nobody starves when rows are short") {
    const std::vector<Need> needs{generating(1, 0), generating(2, 0), generating(3, 0)};
    std::vector<int> served(3);
    for (std::size_t turn = 0; turn < 30; ++turn) {
        const StepPlan plan = plan_step(needs, {1, 16, 64}, turn);
        REQUIRE(plan.rows.size() == 1);
        ++served[plan.rows[0].session - 1];
    }
    CHECK(served == std::vector<int>{10, 10, 10});
}

TEST_CASE("rows of one session stand together in order of position") {
    const std::vector<Need> needs{prompt(1, 3, 20), prompt(2, 0, 20)};
    const StepPlan plan = plan_step(needs, {100, 7, 64}, 1);
    REQUIRE(plan.rows.size() == 14);
    for (std::size_t i = 0; i < 7; ++i) {
        CHECK(plan.rows[i].session == 2);
        CHECK(plan.rows[i].position == i);
        CHECK(plan.rows[7 + i].session == 1);
        CHECK(plan.rows[7 + i].position == 3 + i);
    }
}

TEST_CASE("all logits of a prompt are wanted in pieces of bounded size") {
    const std::vector<Need> needs{prompt(1, 0, 10, true), generating(2, 4)};
    const StepPlan plan = plan_step(needs, {100, 64, 6}, 0);
    CHECK(plan.rows.size() == 7);
    CHECK(plan.want == std::vector<std::uint32_t>{0, 1, 2, 3, 4, 5, 6});
    REQUIRE(plan.shares.size() == 2);
    CHECK(plan.shares[1].first_want == 1);
    CHECK(plan.shares[1].n_want == 6);
    CHECK_FALSE(plan.shares[1].complete);
}

TEST_CASE("every chunk size feeds a prompt completely and in order") {
    for (std::size_t chunk = 1; chunk <= 12; ++chunk) {
        std::size_t fed = 0;
        std::size_t steps = 0;
        while (fed < 11) {
            const std::vector<Need> needs{prompt(1, fed, 11 - fed)};
            const StepPlan plan = plan_step(needs, {5, chunk, 64}, steps++);
            for (std::size_t i = 0; i < plan.rows.size(); ++i)
                REQUIRE(plan.rows[i].position == fed + i);
            fed += plan.rows.size();
            CHECK(plan.shares[0].complete == (fed == 11));
        }
        CHECK(fed == 11);
    }
}

}  // namespace k3::gateway
