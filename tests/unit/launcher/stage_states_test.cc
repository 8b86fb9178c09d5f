#include "launcher/stage_states.h"

#include <doctest/doctest.h>

#include <algorithm>

using namespace k3::launcher;

TEST_CASE("the transition table has one row for each state and event") {
    for (const Transition& a : kTransitions) {
        auto same = [&a](const Transition& b) { return a.from == b.from && a.event == b.event; };
        CHECK(std::count_if(kTransitions.begin(), kTransitions.end(), same) == 1);
    }
    CHECK(next_state(StageState::ready, StageEvent::exited) == StageState::backing_off);
    CHECK_FALSE(next_state(StageState::stopping, StageEvent::answered_ready).has_value());
    CHECK_FALSE(next_state(StageState::backing_off, StageEvent::answered_ready).has_value());
}
