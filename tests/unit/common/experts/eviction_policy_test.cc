// The policies alone, and against the hit rates published with the routing trace.

#include "common/experts/eviction_policy.h"

#include <doctest/doctest.h>

#include <cmath>
#include <string>
#include <vector>

#include "common/experts/rank_weighted_policy.h"
#include "common/experts/trace_replay.h"
#include "tests/support/checkpoint_copy.h"
#include "tests/support/golden.h"

using namespace k3;
using namespace k3::experts;

namespace {

/// The 12 positions x 92 layers of the released model's routing, 16 experts each.
RoutingTrace published_trace() {
    auto trace = read_trace(test::golden_dir() / "routing-trace" / "decode_order.csv");
    REQUIRE(trace.has_value());
    REQUIRE(trace->visits.size() == 12 * 92);
    REQUIRE(trace->n_requests() == 17664);
    REQUIRE(trace->n_positions() == 12);
    return std::move(trace).value();
}

/// Per cent of the requests.
double rate(const RoutingTrace& trace, std::size_t hits) {
    return 100.0 * static_cast<double>(hits) / static_cast<double>(trace.n_requests());
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
    const RoutingTrace trace = published_trace();
    struct Case {
        std::size_t capacity;
        double lru;
        double rank_weighted;
        double best;
    };
    // Printed with one decimal on the trace's page, hence half of the last one as tolerance.
    for (const Case& c :
         {Case{227, 0.0, 8.5, 13.9}, Case{455, 0.0, 14.9, 25.3}, Case{911, 0.0, 24.1, 35.8},
          Case{1823, 31.5, 33.5, 42.4}, Case{3647, 39.0, 39.2, 43.3}}) {
        CAPTURE(c.capacity);
        const double lru = rate(trace, replay(trace, *make("lru", c.capacity)).hits);
        const double rank_weighted =
            rate(trace, replay(trace, *make("rank-weighted", c.capacity)).hits);
        const double best = rate(trace, best_possible_hits(trace, c.capacity));
        MESSAGE(c.capacity << " experts: lru " << lru << " %, rank-weighted " << rank_weighted
                           << " %, best possible " << best << " %");
        CHECK(std::abs(lru - c.lru) <= 0.05);
        CHECK(std::abs(rank_weighted - c.rank_weighted) <= 0.05);
        CHECK(std::abs(best - c.best) <= 0.1);  // the page may count a slot for the expert in use
    }
}

TEST_CASE("with room for everything only the first use of an expert misses") {
    const RoutingTrace trace = published_trace();
    for (std::string_view name : {"lru", "rank-weighted"}) {
        const ReplayCounts counts = replay(trace, *make(name, 93 * 896));
        CHECK(counts.hits == 17664 - 10010);  // 10,010 different experts
        CHECK(counts.hits == best_possible_hits(trace, 93 * 896));
        CHECK(counts.evictions + counts.refused == 0);
    }
}

TEST_CASE("a trace that is none is refused with its line") {
    test::TempDir dir;
    const auto path = dir.path() / "trace.csv";
    CHECK(read_trace(path).error().code == ErrorCode::not_found);
    for (const char* line : {"0,1,5,x", "0", "", "0,1,-3", "0,1,2;3", "0,70000,1"}) {
        CAPTURE(line);
        test::write_file(path, "position,layer,rank0\n0,1,7\n" + std::string(line) + "\n");
        auto trace = read_trace(path);
        REQUIRE(!trace.has_value());
        CHECK(trace.error().code == ErrorCode::corrupt);
        CHECK(trace.error().message.find("line 3") != std::string::npos);
    }
    test::write_file(path, "position,layer,rank0\r\n0,1,7,9\r\n0,2,3\r\n");
    auto trace = read_trace(path);
    REQUIRE(trace.has_value());
    CHECK(trace->n_requests() == 3);
    CHECK(trace->shape(5).n_experts == 10);
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
    const RoutingTrace trace = published_trace();
    const std::vector<RoutingTrace::Visit>& visits = trace.visits;
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
