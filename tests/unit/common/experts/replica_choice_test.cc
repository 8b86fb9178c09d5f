// Spreading over replicas: against the best of all choices, and what stays where it was.

#include "common/experts/replica_choice.h"

#include <doctest/doctest.h>

#include <algorithm>
#include <bit>
#include <numeric>
#include <random>
#include <vector>

using namespace k3;
using experts::ReplicaChoice;

namespace {

using Items = std::vector<ReplicaChoice::Item>;
using Weights = std::vector<std::uint32_t>;

/// Of the busiest server, in items per weight.
double busiest(const Items& items, const Weights& weights) {
    std::vector<double> n(weights.size());
    for (const ReplicaChoice::Item& item : items) n[item.server] += 1.0 / weights[item.server];
    return *std::max_element(n.begin(), n.end());
}

/// Tries every choice.
double least_possible(Items items, const Weights& weights, std::size_t from = 0) {
    if (from == items.size()) return busiest(items, weights);
    double least = 1e9;
    for (std::uint64_t left = items[from].holders; left != 0; left &= left - 1) {
        items[from].server = static_cast<std::uint8_t>(std::countr_zero(left));
        least = std::min(least, least_possible(items, weights, from + 1));
    }
    return least;
}

/// Items 0.. of layer 1, with these holders, at their preferred ones.
Items at_home(const std::vector<std::uint64_t>& holders, const Weights& weights) {
    Items items;
    for (std::uint32_t i = 0; i < holders.size(); ++i)
        items.push_back({holders[i], static_cast<std::uint8_t>(
                                         experts::preferred_holder(1, i, holders[i], weights))});
    return items;
}

}  // namespace

TEST_CASE("no choice of holders leaves the busiest server less to do") {
    std::mt19937 random(20251);
    for (int round = 0; round < 400; ++round) {
        CAPTURE(round);
        const std::size_t n_servers = 2 + random() % 4;
        Weights weights;
        for (std::size_t s = 0; s < n_servers; ++s)
            weights.push_back(round % 2 == 0 ? 1 : 1 + random() % 5);
        std::vector<std::uint64_t> holders;
        for (std::size_t i = 0; i < 7; ++i)
            holders.push_back(1 + random() % ((std::uint64_t{1} << n_servers) - 1));
        Items items = at_home(holders, weights);
        ReplicaChoice choice(items.size());
        choice.spread(items, weights);
        for (std::size_t i = 0; i < items.size(); ++i)
            CHECK(((holders[i] >> items[i].server) & 1) == 1);
        CHECK(busiest(items, weights) == doctest::Approx(least_possible(items, weights)));
    }
}

TEST_CASE("an expert is handed on along a chain of servers") {
    // The first has three, the second one that the third could take: nobody can help directly.
    Items items = {{0b001, 0}, {0b001, 0}, {0b011, 0}, {0b110, 1}, {0b010, 1}};
    const Weights weights = {1, 1, 1};
    ReplicaChoice choice(items.size());
    choice.spread(items, weights);
    CHECK(busiest(items, weights) == 2);
    CHECK(items[2].server == 1);
    CHECK(items[3].server == 2);
}

TEST_CASE("what is spread evenly stays, and of the rest the last ranks move") {
    const Weights weights = {1, 1};
    Items even = {{0b11, 0}, {0b11, 1}, {0b11, 1}, {0b11, 0}};
    Items uneven = {{0b11, 0}, {0b11, 0}, {0b11, 0}, {0b11, 0}};
    ReplicaChoice choice(4);
    choice.spread(even, weights);
    choice.spread(uneven, weights);
    const auto server = [](const Items& items) {
        std::vector<int> servers;
        for (const ReplicaChoice::Item& item : items) servers.push_back(item.server);
        return servers;
    };
    CHECK(server(even) == std::vector<int>{0, 1, 1, 0});
    CHECK(server(uneven) == std::vector<int>{0, 0, 1, 1});
}

TEST_CASE("a server of three times the weight takes three times as many") {
    const Weights weights = {3, 1};
    Items items = at_home(std::vector<std::uint64_t>(16, 0b11), weights);
    ReplicaChoice choice(items.size());
    choice.spread(items, weights);
    CHECK(std::count_if(items.begin(), items.end(), [](auto& i) { return i.server == 0; }) == 12);
}

TEST_CASE("preferred holders have a part in proportion to their weight") {
    for (const Weights& weights : {Weights{1, 1, 1}, Weights{5, 3, 2}, Weights{900, 90, 10}}) {
        std::vector<double> n(3);
        constexpr int kExperts = 9000;
        for (std::uint32_t e = 0; e < kExperts; ++e)
            ++n[experts::preferred_holder(7, e, 0b111, weights)];
        const double total = std::accumulate(weights.begin(), weights.end(), 0.0);
        for (std::size_t s = 0; s < 3; ++s)
            CHECK(n[s] / kExperts == doctest::Approx(weights[s] / total).epsilon(0.01));
    }
    CHECK(experts::preferred_holder(7, 0, std::uint64_t{1} << 63U, Weights(64, 9)) == 63);
}

TEST_CASE("the largest calls are spread too") {
    constexpr std::size_t kServers = experts::kMaxServers;
    std::mt19937 random(5);
    Weights weights;
    for (std::size_t s = 0; s < kServers; ++s) weights.push_back(1 + random() % 1'000'000);
    std::vector<std::uint64_t> holders;
    for (std::size_t i = 0; i < 896; ++i)
        holders.push_back(std::uint64_t{1} << random() % kServers | std::uint64_t{1}
                                                                        << random() % kServers);
    Items items = at_home(holders, weights);
    const double before = busiest(items, weights);
    ReplicaChoice choice(items.size());
    choice.spread(items, weights);
    CHECK(busiest(items, weights) <= before);
}
