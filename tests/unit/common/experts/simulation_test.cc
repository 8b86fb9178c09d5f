// The model of a step over boxes, on cases that can be worked out by hand.

#include "common/experts/simulation.h"

#include <doctest/doctest.h>

#include "common/model/tensor_names.h"
#include "tests/support/released_config.h"
#include "tests/support/text.h"

using namespace k3;
using experts::SimulatedBox;
using experts::Simulation;
using experts::SimulationOptions;
using test::contains;
using test::released_config;

namespace {

double expert_bytes() { return static_cast<double>(model::expert_bytes(released_config())); }

/// Reads an expert a second and computes ten.
SimulatedBox a_box(const std::string& share) {
    SimulatedBox made;
    made.held = model::parse_share(share, released_config()).value();
    made.disk_rate = expert_bytes();
    made.memory_rate = 10 * expert_bytes();
    return made;
}

/// Two positions of one layer: experts 0, 1, 2, 3 and 0, 1, 4, 6.
experts::RoutingTrace small_trace() {
    experts::RoutingTrace trace;
    trace.visits.push_back({0, 2, {{0, 0}, {1, 1}, {2, 2}, {3, 3}}});
    trace.visits.push_back({1, 2, {{0, 0}, {1, 1}, {4, 2}, {6, 3}}});
    return trace;
}

Simulation simulated(const SimulationOptions& options) {
    auto done = experts::simulate(options, small_trace(), released_config());
    REQUIRE_MESSAGE(done.has_value(), done.error().sentence());
    return std::move(done).value();
}

}  // namespace

TEST_CASE("one box reads what it has not kept, and computes the last one after its read") {
    SimulationOptions options;
    options.boxes = {a_box("all")};
    const Simulation cold = simulated(options);
    CHECK(cold.n_steps == 2);
    CHECK(cold.expert_s == doctest::Approx(4.1 + 4.1));
    CHECK(cold.imbalance == doctest::Approx(1));
    CHECK(cold.boxes[0].used == 8);
    CHECK(cold.boxes[0].hits == 0);
    CHECK(cold.boxes[0].read_bytes == 8 * model::expert_bytes(released_config()));

    options.boxes[0].cache_slots = 100;
    const Simulation warm = simulated(options);
    CHECK(warm.boxes[0].hits == 2);
    CHECK(warm.expert_s == doctest::Approx(4.1 + 2.1));
}

TEST_CASE("the slowest box and its link decide, and rows of a step share reads") {
    SimulationOptions options;
    options.boxes = {a_box("0/2"), a_box("1/2")};  // even experts of layer 2 on the first
    options.boxes[1].round_trip_s = 10;
    options.boxes[1].link_rate = 1000;
    const double row_s = 3584 * 12 / 1000.0;
    const Simulation apart = simulated(options);
    CHECK(apart.expert_s == doctest::Approx((2.1 + 10 + row_s) + (1.1 + 10 + row_s)));
    CHECK(apart.imbalance == doctest::Approx((1 + 1.5) / 2));
    CHECK(apart.boxes[1].link_bytes == 2 * 3584 * 12);

    options.rows_per_step = 2;
    const Simulation together = simulated(options);
    CHECK(together.n_steps == 1);
    CHECK(together.n_rows == 2);
    CHECK(together.boxes[0].used == 4);
    CHECK(together.boxes[1].used == 2);
    CHECK(together.expert_s == doctest::Approx(2.1 + 10 + 2 * row_s));
    options.trunk_link_rate = 100;
    CHECK(simulated(options).expert_s == doctest::Approx(4 * 3584 * 12 / 100.0));
}

TEST_CASE("replicas are chosen as the trunk chooses them") {
    SimulationOptions options;
    options.boxes = {a_box("all"), a_box("all")};
    CHECK(simulated(options).imbalance == doctest::Approx(1));
    CHECK(simulated(options).expert_s == doctest::Approx(4.2));
    options.boxes[0].weight = 3;
    const Simulation uneven = simulated(options);
    CHECK(uneven.boxes[0].used == 6);
    CHECK(uneven.imbalance == doctest::Approx(1));
}

TEST_CASE("what cannot be simulated is refused") {
    SimulationOptions options;
    const auto refusal = [&] {
        return experts::simulate(options, small_trace(), released_config()).error().message;
    };
    CHECK(contains(refusal(), "0 boxes"));
    options.boxes = {a_box("0/2")};
    CHECK(contains(refusal(), "expert 1 of layer 2, which no box holds"));
    options.boxes = {a_box("all")};
    options.boxes[0].disk_rate = 0;
    CHECK(contains(refusal(), "reads 0 bytes"));
    options.boxes = {a_box("all")};
    options.policy = "best";
    CHECK(contains(refusal(), "'best'"));
    CHECK(contains(experts::simulate(options, {}, released_config()).error().message, "no picks"));
}
