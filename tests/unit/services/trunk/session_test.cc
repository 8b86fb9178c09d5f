// Session memory: what is reserved, counted, refused and copied.

#include "services/trunk/session.h"

#include <doctest/doctest.h>

#include <limits>
#include <string>

#include "common/base/settings.h"
#include "tests/support/text.h"
#include "tests/unit/services/trunk/harness.h"

namespace k3::test {

namespace {

using trunk::LayerRange;
using trunk::SessionLayout;
using trunk::SessionTable;

constexpr LayerRange kAll{0, 13};

SessionTable table(std::uint32_t max_sessions, std::uint64_t budget_bytes) {
    return {tiny_model().config, kAll, 2, {max_sessions, budget_bytes, 4096}};
}

}  // namespace

TEST_CASE("a session's bytes are its KDA states and 40 values per position and MLA layer") {
    // 9 KDA layers of 3 heads: a 16 x 16 matrix and three histories of 3 x 16. 4 MLA layers: a
    // latent of 32 and a key of 8 per position; and one score per position for each of 2 threads.
    const SessionLayout layout(tiny_model().config, kAll, 2);
    const std::uint64_t fixed = 9 * 3 * (16 * 16 + 3 * 3 * 16) * 4;
    CHECK(layout.bytes(1) == fixed + (4 * 40 + 2) * 4);
    CHECK(layout.bytes(1000) == fixed + 1000 * (4 * 40 + 2) * 4);
    CHECK(layout.bytes(std::uint64_t{1} << 62U) == std::numeric_limits<std::uint64_t>::max());
    const SessionLayout only_kda(tiny_model().config, {0, 3}, 2);
    CHECK(only_kda.bytes(1) == only_kda.bytes(1000));
}

TEST_CASE("the budget refuses what does not fit and names both numbers") {
    const std::uint64_t one = SessionLayout(tiny_model().config, kAll, 2).bytes(100);
    SessionTable sessions = table(10, 2 * one);
    CHECK(sessions.open(1, 100).has_value());
    CHECK(sessions.open(2, 100).has_value());
    CHECK(sessions.used_bytes() == 2 * one);
    const auto refused = sessions.open(3, 100);
    REQUIRE(!refused.has_value());
    CHECK(refused.error().code == ErrorCode::resource_exhausted);
    CHECK(contains(refused.error().message, format_bytes(one)));
    CHECK(contains(refused.error().message, format_bytes(2 * one)));
    CHECK(contains(refused.error().remedy, "--session-bytes"));

    sessions.drop(1);
    CHECK(sessions.used_bytes() == one);
    CHECK(sessions.open(3, 100).has_value());
}

TEST_CASE("session numbers, counts and lengths that cannot be are refused") {
    SessionTable sessions = table(2, std::uint64_t{1} << 30U);
    CHECK(sessions.open(0, 10).error().code == ErrorCode::invalid_argument);
    CHECK(sessions.open(1, 0).error().code == ErrorCode::invalid_argument);
    const auto too_long = sessions.open(1, 4097);
    CHECK(too_long.error().code == ErrorCode::resource_exhausted);
    CHECK(contains(too_long.error().message, "4097"));
    CHECK(contains(too_long.error().message, "4096"));
    CHECK(sessions.open(1, std::numeric_limits<std::uint64_t>::max()).error().code ==
          ErrorCode::resource_exhausted);
    CHECK(sessions.open(1, 10).has_value());
    const auto twice = sessions.open(1, 10);
    CHECK(twice.error().code == ErrorCode::invalid_argument);
    CHECK(contains(twice.error().message, "session 1 is already open"));
    CHECK(sessions.open(2, 10).has_value());
    const auto too_many = sessions.open(3, 10);
    CHECK(too_many.error().code == ErrorCode::resource_exhausted);
    CHECK(contains(too_many.error().message, "2 of 2 sessions"));
    CHECK(sessions.size() == 2);
}

TEST_CASE("a refused fork leaves the table as it was") {
    SessionTable sessions = table(3, std::uint64_t{1} << 30U);
    CHECK(sessions.fork(7, 8, 10).error().code == ErrorCode::not_found);
    trunk::Session* source = sessions.open(1, 50).value();
    source->advance(20);
    const Status too_short = sessions.fork(1, 2, 19);
    CHECK(too_short.error().code == ErrorCode::invalid_argument);
    CHECK(contains(too_short.error().message, "19"));
    CHECK(contains(too_short.error().message, "20"));
    CHECK(sessions.fork(1, 1, 50).error().code == ErrorCode::invalid_argument);
    CHECK(sessions.fork(1, 0, 50).error().code == ErrorCode::invalid_argument);
    CHECK(sessions.size() == 1);
    CHECK(sessions.fork(1, 2, 20).has_value());
    CHECK(sessions.find(2).value()->position() == 20);
}

TEST_CASE("a new session begins from zero even in memory that was used before") {
    SessionTable sessions = table(2, std::uint64_t{1} << 30U);
    for (int lap = 0; lap < 3; ++lap) {
        trunk::Session* session = sessions.open(1, 8).value();
        trunk::KdaHeadState state = session->kda(0, 0);
        CHECK(state.matrix[0] == 0.0F);
        CHECK(state.v_history[0] == 0.0F);
        state.matrix[0] = 1.0F;
        state.v_history[0] = 1.0F;
        sessions.drop(1);
    }
}

TEST_CASE("a poisoned session refuses until it is dropped, and dropping is always safe") {
    SessionTable sessions = table(2, std::uint64_t{1} << 30U);
    sessions.open(1, 8).value()->set_poison("layer 3: expert server experts-0 is gone");
    const auto found = sessions.find(1);
    REQUIRE(!found.has_value());
    CHECK(found.error().code == ErrorCode::unavailable);
    CHECK(contains(found.error().message, "experts-0 is gone"));
    CHECK(contains(found.error().remedy, "drop"));
    CHECK(!sessions.fork(1, 2, 8).has_value());
    sessions.drop(1);
    sessions.drop(1);
    CHECK(sessions.find(1).error().code == ErrorCode::not_found);
    CHECK(sessions.open(1, 8).has_value());
}

}  // namespace k3::test
