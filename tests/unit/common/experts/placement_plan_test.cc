// Placements made from weights, replicas and a trace: who gets how many, and that they are spread.

#include "common/experts/placement_plan.h"

#include <doctest/doctest.h>

#include <algorithm>

#include "common/experts/simulation.h"
#include "tests/support/golden.h"
#include "tests/support/released_config.h"
#include "tests/support/text.h"

using namespace k3;
using experts::PlacementRequest;
using Placements = std::vector<model::Placement>;
using test::contains;
using test::released_config;

namespace {

const experts::RoutingTrace& routed() {
    static const experts::RoutingTrace read =
        experts::read_trace(test::golden_dir() / "routing-trace" / "decode_order.csv").value();
    return read;
}

Placements place(const PlacementRequest& request) {
    auto placed = experts::place_experts(request, released_config());
    REQUIRE_MESSAGE(placed.has_value(), placed.error().sentence());
    return std::move(placed).value();
}

std::size_t n_holders(const Placements& placements, std::uint32_t layer, std::uint32_t expert) {
    return static_cast<std::size_t>(
        std::count_if(placements.begin(), placements.end(),
                      [&](const model::Placement& p) { return p.holds(layer, expert); }));
}

std::uint64_t n_of_layer(const model::Placement& placement, std::uint32_t layer) {
    std::uint64_t n = 0;
    for (std::uint32_t e = 0; e < released_config().moe.n_experts; ++e)
        n += placement.holds(layer, e);
    return n;
}

std::string refusal(const PlacementRequest& request) {
    const auto placed = experts::place_experts(request, released_config());
    REQUIRE(!placed.has_value());
    CHECK(placed.error().code == ErrorCode::invalid_argument);
    return placed.error().message;
}

double imbalance(const Placements& placements) {
    experts::SimulationOptions options;
    for (const model::Placement& held : placements)
        options.boxes.push_back({.held = held, .disk_rate = 1, .memory_rate = 1});
    return experts::simulate(options, routed(), released_config())->imbalance;
}

}  // namespace

TEST_CASE("equal weights give the default stripes") {
    const Placements placements = place({.weights = {1, 1, 1}});
    for (std::uint32_t i = 0; i < 3; ++i) {
        const auto stripe = model::parse_share(std::to_string(i) + "/3", released_config()).value();
        CHECK(placements[i].holdings() == stripe.holdings());
    }
}

TEST_CASE("every expert has as many holders as asked for, and servers their part of every layer") {
    for (const std::vector<std::uint32_t>& weights :
         {std::vector<std::uint32_t>{5, 3, 2}, {1, 1, 1, 1}, {100, 1, 1}, {7}}) {
        double total = 0;
        for (std::uint32_t weight : weights) total += weight;
        for (std::uint32_t replicas = 1; replicas <= std::min<std::size_t>(2, weights.size());
             ++replicas) {
            const Placements placements = place({.weights = weights, .replicas = replicas});
            for (std::uint32_t layer = 1; layer < released_config().n_layers; ++layer) {
                for (std::uint32_t e = 0; e < released_config().moe.n_experts; ++e)
                    REQUIRE(n_holders(placements, layer, e) == replicas);
                // Nobody can hold more than all; what is left is shared by the others.
                const double part = replicas * weights[0] / total;
                REQUIRE(std::abs(double(n_of_layer(placements[0], layer)) -
                                 std::min(part, 1.0) * 896) < 3);
            }
        }
    }
}

TEST_CASE("only the part of the experts that is used most is replicated") {
    const Placements placements =
        place({.weights = {1, 1, 1, 1}, .replicas = 3, .replicated = 0.25, .trace = &routed()});
    const experts::RoutingTrace::Visit& visit = routed().visits.front();
    std::size_t n_replicated = 0;
    for (std::uint32_t e = 0; e < 896; ++e) {
        const std::size_t n = n_holders(placements, visit.layer, e);
        CHECK((n == 1 || n == 3));
        n_replicated += n == 3;
    }
    CHECK(n_replicated == 224);
    for (const experts::ExpertUse& use : visit.uses)
        CHECK(n_holders(placements, visit.layer, use.expert) == 3);
}

TEST_CASE("experts that were picked together are on different servers") {
    for (std::size_t n : {2U, 4U, 8U}) {
        const std::vector<std::uint32_t> even(n, 1);
        const double striped = imbalance(place({.weights = even}));
        const double apart = imbalance(place({.weights = even, .trace = &routed()}));
        const double twice = imbalance(place({.weights = even, .replicas = 2}));
        CAPTURE(n);
        CHECK(striped > 1.15);
        CHECK(apart < 1.03);
        CHECK(twice < (n == 8 ? 1.3 : 1.02));
    }
}

TEST_CASE("the same request gives the same placement") {
    const PlacementRequest request{
        .weights = {3, 2, 2}, .replicas = 2, .replicated = 0.5, .trace = &routed()};
    const Placements first = place(request);
    const Placements second = place(request);
    for (std::size_t s = 0; s < 3; ++s) CHECK(first[s].holdings() == second[s].holdings());
}

TEST_CASE("what cannot be placed is refused with the numbers") {
    CHECK(contains(refusal({.weights = {}}), "over 0 servers"));
    CHECK(contains(refusal({.weights = std::vector<std::uint32_t>(65, 1)}), "over 65 servers"));
    CHECK(contains(refusal({.weights = {1, 1}, .replicas = 3}), "3 replicas of every expert on 2"));
    CHECK(contains(refusal({.weights = {1, 1}, .replicas = 2, .replicated = 0.5}), "no trace"));
    CHECK(contains(refusal({.weights = {1}, .replicated = 1.5, .trace = &routed()}), "1.5"));
    experts::RoutingTrace other;
    other.visits.push_back({0, 5, {{896, 0}}});
    CHECK(contains(refusal({.weights = {1}, .trace = &other}), "expert 896 of layer 5"));
}
