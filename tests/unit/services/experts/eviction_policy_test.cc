// The policies alone, and against the hit rates published with the routing trace.

#include "services/experts/eviction_policy.h"

#include <doctest/doctest.h>

#include <fstream>
#include <sstream>
#include <string>
#include <vector>

#include "services/experts/rank_weighted_policy.h"
#include "tests/support/golden.h"

using namespace k3;
using namespace k3::experts;

namespace {

struct Visit {
    std::uint32_t layer = 0;
    std::vector<ExpertUse> uses;
};

/// The 12 positions x 92 layers of the released model's routing, 16 experts each.
std::vector<Visit> read_trace() {
    std::ifstream file(test::golden_dir() / "routing-trace" / "decode_order.csv");
    REQUIRE(file.good());
    std::string line;
    std::getline(file, line);  // the names of the columns
    std::vector<Visit> visits;
    while (std::getline(file, line)) {
        std::istringstream cells(line);
        std::string cell;
        std::getline(cells, cell, ',');  // position
        Visit visit;
        std::getline(cells, cell, ',');
        visit.layer = static_cast<std::uint32_t>(std::stoul(cell));
        for (std::uint32_t rank = 0; std::getline(cells, cell, ','); ++rank)
            visit.uses.push_back({static_cast<std::uint32_t>(std::stoul(cell)), rank});
        visits.push_back(std::move(visit));
    }
    REQUIRE(visits.size() == 12 * 92);
    return visits;
}

/// Per cent of the requests whose expert was kept when its layer was visited.
double hit_rate(EvictionPolicy& policy, const std::vector<Visit>& visits) {
    std::size_t hits = 0;
    std::size_t requests = 0;
    for (const Visit& visit : visits) {
        policy.visit(visit.layer, visit.uses);
        std::vector<ExpertKey> missed;
        for (const ExpertUse& use : visit.uses) {
            ++requests;
            if (policy.keeps({visit.layer, use.expert}))
                ++hits;
            else
                missed.push_back({visit.layer, use.expert});
        }
        for (ExpertKey key : missed) policy.admit(key);
    }
    return 100.0 * static_cast<double>(hits) / static_cast<double>(requests);
}

std::unique_ptr<EvictionPolicy> make(std::string_view name, std::size_t capacity,
                                     std::uint32_t n_layers = 93, std::uint32_t n_experts = 896) {
    return std::move(make_policy(name, {n_layers, n_experts, capacity})).value();
}

void use(EvictionPolicy& policy, std::uint32_t layer, std::vector<ExpertUse> uses) {
    policy.visit(layer, uses);
    for (const ExpertUse& one : uses)
        if (!policy.keeps({layer, one.expert})) policy.admit({layer, one.expert});
}

}  // namespace

TEST_CASE("the published trace gives the published hit rates") {
    const std::vector<Visit> visits = read_trace();
    struct Case {
        std::size_t capacity;
        double lru;
        double rank_weighted;
    };
    // Printed with one decimal on the trace's page, hence half of the last one as tolerance.
    for (const Case& c : {Case{227, 0.0, 8.5}, Case{455, 0.0, 14.9}, Case{911, 0.0, 24.1},
                          Case{1823, 31.5, 33.5}, Case{3647, 39.0, 39.2}}) {
        CAPTURE(c.capacity);
        const double lru = hit_rate(*make("lru", c.capacity), visits);
        const double rank_weighted = hit_rate(*make("rank-weighted", c.capacity), visits);
        MESSAGE(c.capacity << " experts: lru " << lru << " %, rank-weighted " << rank_weighted
                           << " %");
        CHECK(std::abs(lru - c.lru) <= 0.05);
        CHECK(std::abs(rank_weighted - c.rank_weighted) <= 0.05);
    }
}

TEST_CASE("with room for everything only the first use of an expert misses") {
    const std::vector<Visit> visits = read_trace();
    for (std::string_view name : {"lru", "rank-weighted"})
        CHECK(hit_rate(*make(name, 93 * 896), visits) == doctest::Approx(43.33).epsilon(0.001));
}

TEST_CASE("without room nothing is kept") {
    for (std::string_view name : {"lru", "rank-weighted"}) {
        auto policy = make(name, 0);
        use(*policy, 1, {{5, 0}});
        CHECK(!policy->keeps({1, 5}));
        CHECK(policy->size() == 0);
    }
}

TEST_CASE("a policy never keeps more than its capacity, and exactly what it did not evict") {
    const std::vector<Visit> visits = read_trace();
    for (std::string_view name : {"lru", "rank-weighted"}) {
        auto policy = make(name, 100);
        std::vector<bool> kept(93 * 896);
        for (std::size_t i = 0; i < 300; ++i) {
            policy->visit(visits[i].layer, visits[i].uses);
            for (const ExpertUse& one : visits[i].uses) {
                const ExpertKey key{visits[i].layer, one.expert};
                if (policy->keeps(key)) continue;
                const EvictionPolicy::Admission admission = policy->admit(key);
                REQUIRE(policy->keeps(key) == admission.admitted);
                if (admission.admitted) kept[key.layer * 896 + key.expert] = true;
                if (!admission.evicts) continue;
                REQUIRE(!policy->keeps(admission.evicted));
                REQUIRE(kept[admission.evicted.layer * 896 + admission.evicted.expert]);
                kept[admission.evicted.layer * 896 + admission.evicted.expert] = false;
            }
            REQUIRE(policy->size() <= 100);
        }
        REQUIRE(policy->size() == 100);
        for (std::uint32_t layer = 0; layer < 93; ++layer)
            for (std::uint32_t expert = 0; expert < 896; ++expert)
                REQUIRE(policy->keeps({layer, expert}) == kept[layer * 896 + expert]);
    }
}

TEST_CASE("least recently used goes first, and a use counts") {
    auto policy = make("lru", 2, 4, 8);
    use(*policy, 1, {{0, 0}});
    use(*policy, 2, {{0, 0}});
    use(*policy, 1, {{0, 0}});
    use(*policy, 3, {{0, 0}});
    CHECK(policy->keeps({1, 0}));
    CHECK(!policy->keeps({2, 0}));
    CHECK(policy->keeps({3, 0}));
}

TEST_CASE("an expert that could not be read leaves room") {
    for (std::string_view name : {"lru", "rank-weighted"}) {
        auto policy = make(name, 2, 4, 8);
        use(*policy, 1, {{0, 0}, {1, 1}});
        policy->drop({1, 0});
        CHECK(policy->size() == 1);
        policy->visit(1, std::vector<ExpertUse>{{2, 0}});
        const EvictionPolicy::Admission admission = policy->admit({1, 2});
        CHECK(admission.admitted);
        CHECK(!admission.evicts);
        CHECK(policy->keeps({1, 1}));
    }
}

TEST_CASE("the value follows the published formula") {
    RankWeightedPolicy policy({2, 64, 4});
    use(policy, 1, {{7, 0}, {9, 15}});
    CHECK(policy.value({1, 7}) == 0.65);
    CHECK(policy.value({1, 9}) == doctest::Approx(0.185));
    use(policy, 1, {{9, 3}});
    CHECK(policy.value({1, 7}) == doctest::Approx(0.26));
    CHECK(policy.value({1, 9}) == doctest::Approx(0.557));
    use(policy, 1, {{7, 15}});
    CHECK(policy.value({1, 7}) == doctest::Approx(0.185));  // 0.26 * 0.4 is less
    CHECK(policy.value({0, 7}) == 0);
}

TEST_CASE("a full set refuses an expert that is worth no more than its poorest") {
    RankWeightedPolicy policy({3, 64, 2});
    use(policy, 1, {{0, 0}, {1, 1}});
    use(policy, 2, {{0, 1}});  // as much as the poorest
    CHECK(!policy.keeps({2, 0}));
    use(policy, 2, {{1, 0}});  // more
    CHECK(policy.keeps({2, 1}));
    CHECK(policy.keeps({1, 0}));
    CHECK(!policy.keeps({1, 1}));
}

TEST_CASE("an expert of the same call may go") {
    RankWeightedPolicy policy({2, 64, 1});
    use(policy, 1, {{5, 9}});
    use(policy, 1, {{6, 0}, {5, 9}});
    CHECK(policy.keeps({1, 6}));
    CHECK(!policy.keeps({1, 5}));
}

TEST_CASE("ranks beyond 20 count like rank 20 and age stops at zero") {
    RankWeightedPolicy policy({2, 64, 64});
    use(policy, 1, {{0, 20}, {1, 21}, {2, 4000000000U}});
    CHECK(policy.value({1, 0}) == doctest::Approx(0.03));
    CHECK(policy.value({1, 1}) == policy.value({1, 0}));
    CHECK(policy.value({1, 2}) == policy.value({1, 0}));
    for (int i = 0; i < 200; ++i) policy.visit(1, {});
    CHECK(policy.value({1, 0}) == 0);
    CHECK(policy.keeps({1, 0}));
}

TEST_CASE("an unknown policy is refused with the known ones") {
    auto policy = make_policy("fifo", {2, 4, 1});
    REQUIRE(!policy.has_value());
    CHECK(policy.error().code == ErrorCode::invalid_argument);
    CHECK(policy.error().sentence().find("fifo") != std::string::npos);
    CHECK(policy.error().sentence().find("rank-weighted") != std::string::npos);
}
