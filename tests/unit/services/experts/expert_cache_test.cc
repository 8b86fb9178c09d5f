// Slots, leases and reads, over a store that can wait and fail.

#include "services/experts/expert_cache.h"

#include <doctest/doctest.h>

#include <atomic>
#include <numeric>
#include <random>
#include <thread>
#include <vector>

#include "services/experts/kept_experts.h"
#include "tests/unit/services/experts/fake_store.h"

using namespace k3;
using namespace k3::experts;
using test::FakeStore;

namespace {

constexpr std::uint32_t kLayers = 6;
constexpr std::uint32_t kExperts = 16;
constexpr std::uint64_t kSlot = 8192;  // a FakeStore record touches two pages at most

ExpertCache::Options options(std::size_t n_slots, std::string policy = "rank-weighted") {
    ExpertCache::Options options;
    options.budget_bytes = n_slots * kSlot;
    options.n_layers = kLayers;
    options.n_experts = kExperts;
    options.n_held = kLayers * kExperts;
    options.top_k = 4;
    options.n_readers = 3;
    options.policy = std::move(policy);
    return options;
}

struct Cache {
    FakeStore store;
    std::unique_ptr<ExpertCache> cache;

    explicit Cache(const ExpertCache::Options& with) {
        Result<std::unique_ptr<ExpertCache>> made = ExpertCache::create(with, store);
        REQUIRE(made.has_value());
        cache = std::move(made).value();
    }
    ~Cache() { store.open(); }  // a reader must not wait for ever
    ExpertCache* operator->() const { return cache.get(); }

    /// Visits and returns the order asked for.
    std::vector<std::uint32_t> visit(std::uint32_t layer, const std::vector<ExpertUse>& uses) {
        std::vector<std::uint32_t> order(uses.size());
        cache->visit(layer, uses, order);
        return order;
    }

    /// One call: visits, and acquires everything in the order asked for.
    void call(std::uint32_t layer, const std::vector<std::uint32_t>& experts) {
        std::vector<ExpertUse> uses;
        for (std::uint32_t rank = 0; rank < experts.size(); ++rank)
            uses.push_back({experts[rank], rank});
        for (std::uint32_t i : visit(layer, uses)) {
            const ExpertKey key{layer, uses[i].expert};
            Result<ExpertLease> lease = cache->acquire(key, soon());
            REQUIRE(lease.has_value());
            REQUIRE(FakeStore::holds(lease->bytes(), key));
        }
    }
    static Deadline soon() { return Deadline::after_ms(20'000); }
};

Error broken() { return Error{ErrorCode::corrupt, "the scale is 255", "copy it again"}; }

}  // namespace

TEST_CASE("an expert is read once and then kept") {
    Cache cache(options(96));
    cache.call(1, {3, 5});
    cache.call(1, {5, 3});
    CHECK(cache.store.reads({1, 3}) == 1);
    CHECK(cache.store.reads({1, 5}) == 1);
    const CacheCounts counts = cache->counts();
    CHECK(counts.hits == 2);
    CHECK(counts.misses == 2);
    CHECK(counts.reads == 2);
    CHECK(counts.evictions == 0);
}

TEST_CASE("a lease keeps its slot") {
    Cache cache(options(4));
    cache.visit(1, {{0, 0}});
    Result<ExpertLease> lease = cache->acquire({1, 0}, Cache::soon());
    REQUIRE(lease.has_value());
    for (std::uint32_t round = 0; round < 20; ++round)
        cache.call(1 + round % 4, {(round + 1) % 8 + 1, (round + 4) % 8 + 2});
    CHECK(FakeStore::holds(lease->bytes(), {1, 0}));
}

TEST_CASE("the smallest legal cache serves calls of any size, in any order") {
    Cache cache(options(2));
    CHECK(cache->slots().n_slots == 2);
    CHECK(cache->slots().n_kept == 0);
    cache.call(1, {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15});
    std::vector<ExpertUse> uses;
    for (std::uint32_t expert = 0; expert < kExperts; ++expert) uses.push_back({expert, expert});
    cache.visit(2, uses);
    for (std::uint32_t expert = kExperts; expert-- > 0;) {  // the worst order
        Result<ExpertLease> lease = cache->acquire({2, expert}, Cache::soon());
        REQUIRE(lease.has_value());
        CHECK(FakeStore::holds(lease->bytes(), {2, expert}));
    }
}

TEST_CASE("a budget below the smallest legal cache is refused with the bytes it needs") {
    FakeStore store;
    ExpertCache::Options small = options(2);
    small.budget_bytes -= 1;
    Result<std::unique_ptr<ExpertCache>> cache = ExpertCache::create(small, store);
    REQUIRE(!cache.has_value());
    CHECK(cache.error().code == ErrorCode::resource_exhausted);
    CHECK(cache.error().message.find("16383") != std::string::npos);
    CHECK(cache.error().remedy.find("16384") != std::string::npos);
}

TEST_CASE("no more slots are taken than there are experts, and then none is set aside") {
    CHECK(ExpertCache::slots_for(options(5000), kSlot)->n_slots == 96);
    CHECK(ExpertCache::slots_for(options(5000), kSlot)->n_kept == 96);
    CHECK(ExpertCache::slots_for(options(95), kSlot)->n_kept == 91);
    ExpertCache::Options one = options(1);
    one.n_held = 1;
    CHECK(ExpertCache::slots_for(one, kSlot)->n_kept == 1);
}

TEST_CASE("an unknown policy is refused") {
    FakeStore store;
    CHECK(!ExpertCache::create(options(8, "mru"), store).has_value());
}

TEST_CASE("the reads of one call go in parallel") {
    Cache cache(options(96));
    cache.store.close();
    cache.visit(1, {{0, 0}, {1, 1}, {2, 2}, {3, 3}});
    cache.store.wait_for_reads(3);  // as many as there are readers
    cache.store.open();
    for (std::uint32_t expert = 0; expert < 4; ++expert)
        CHECK(cache->acquire({1, expert}, Cache::soon()).has_value());
    CHECK(cache.store.most_at_once() == 3);
}

TEST_CASE("what is there comes first, then what is on its way") {
    Cache cache(options(96));
    cache.call(1, {7});
    cache.store.close();
    cache->prefetch(1, std::vector<std::uint32_t>{9});
    CHECK(cache.visit(1, {{2, 0}, {9, 1}, {7, 2}}) == std::vector<std::uint32_t>{2, 1, 0});
}

TEST_CASE("acquire shares the read that a hint began") {
    Cache cache(options(96));
    cache.store.close();
    cache->prefetch(1, std::vector<std::uint32_t>{4});
    cache.store.wait_for_reads(1);
    std::jthread opener([&] { cache.store.open(); });
    cache.call(1, {4});
    CHECK(cache.store.reads({1, 4}) == 1);
    const CacheCounts counts = cache->counts();
    CHECK(counts.prefetch_reads == 1);
    CHECK(counts.prefetch_useful + counts.prefetch_late == 1);
    CHECK(counts.misses == 1);
    cache.call(1, {4});  // and it was admitted like any other miss
    CHECK(cache->counts().hits == 1);
}

TEST_CASE("a call's reads overtake hints") {
    Cache cache([] {
        ExpertCache::Options one = options(96);
        one.n_readers = 1;
        return one;
    }());
    cache.store.hold({1, 0});
    cache.store.hold({1, 1});
    cache->prefetch(1, std::vector<std::uint32_t>{0, 1});
    cache.store.wait_for_reads(1);
    cache.visit(2, {{5, 0}});
    cache.store.let_go({1, 0});
    CHECK(cache->acquire({2, 5}, Cache::soon()).has_value());  // (1, 1) still waits
    cache.store.let_go({1, 1});
}

TEST_CASE("hints take no slot that a call needs, and stale ones give theirs back") {
    Cache cache(options(4));  // all four for passing experts
    cache->prefetch(1, std::vector<std::uint32_t>{0, 1, 2, 3, 4, 5});
    CHECK(cache->counts().prefetch_reads == 4);
    CHECK(cache->counts().prefetch_dropped == 2);
    while (cache->counts().reads < 4) std::this_thread::yield();
    cache.call(2, {0, 1, 2, 3});  // nobody followed the hints
    const CacheCounts counts = cache->counts();
    CHECK(counts.prefetch_unused == 4);
    CHECK(counts.prefetch_useful == 0);
    cache->prefetch(1, std::vector<std::uint32_t>{6, 7});
    CHECK(cache->counts().prefetch_reads == 6);
}

TEST_CASE("a failed read is reported, not kept, and tried again") {
    Cache cache(options(96));
    cache.store.fail({1, 2}, broken());
    cache.visit(1, {{2, 0}});
    Result<ExpertLease> failed = cache->acquire({1, 2}, Cache::soon());
    REQUIRE(!failed.has_value());
    CHECK(failed.error().code == ErrorCode::corrupt);
    CHECK(failed.error().message == "the scale is 255");
    CHECK(cache->counts().failed_reads == 1);
    cache.store.heal({1, 2});
    cache.call(1, {2});
    CHECK(cache->counts().hits == 0);
    CHECK(cache.store.reads({1, 2}) == 2);
}

TEST_CASE("a hint whose read fails is reported by the call that needs the expert") {
    Cache cache(options(96));
    cache.store.fail({1, 2}, broken());
    SUBCASE("after the failure") {
        cache->prefetch(1, std::vector<std::uint32_t>{2});
        while (cache->counts().failed_reads == 0) std::this_thread::yield();
    }
    SUBCASE("while it is being read") {
        cache.store.close();
        cache->prefetch(1, std::vector<std::uint32_t>{2});
        cache.store.wait_for_reads(1);
    }
    cache.visit(1, {{2, 0}, {3, 1}});
    cache.store.open();
    Result<ExpertLease> failed = cache->acquire({1, 2}, Cache::soon());
    REQUIRE(!failed.has_value());
    CHECK(failed.error().code == ErrorCode::corrupt);
    CHECK(cache->acquire({1, 3}, Cache::soon()).has_value());
    cache.store.heal({1, 2});
    cache.call(1, {2, 3});
}

TEST_CASE("a call that was given up leaves nothing behind") {
    for (std::size_t n_slots : {2, 4, 8, 96}) {
        CAPTURE(n_slots);
        Cache cache(options(n_slots));
        cache.store.close();
        std::vector<ExpertUse> uses;
        for (std::uint32_t expert = 0; expert < kExperts; ++expert)
            uses.push_back({expert, expert});
        cache.visit(1, uses);  // and never acquires
        cache.store.open();
        for (int round = 0; round < 3; ++round) {
            cache.call(2, {1, 2, 3, 4});
            cache.call(1, {3, 5, 0, 15});
        }
    }
}

TEST_CASE("an acquire ends at its deadline and names the expert") {
    Cache cache(options(96));
    cache.store.close();
    Result<ExpertLease> late = cache->acquire({3, 7}, Deadline::after_ms(10));
    REQUIRE(!late.has_value());
    CHECK(late.error().code == ErrorCode::deadline_exceeded);
    CHECK(late.error().message.find("layer 3 expert 7") != std::string::npos);
    cache.store.open();
    CHECK(cache->acquire({3, 7}, Cache::soon()).has_value());
    CHECK(cache->counts().read_wait_ns >= 10'000'000);
}

TEST_CASE("when every slot is leased the sentence says so") {
    Cache cache(options(2));
    Result<ExpertLease> first = cache->acquire({1, 0}, Cache::soon());
    Result<ExpertLease> second = cache->acquire({1, 1}, Cache::soon());
    Result<ExpertLease> third = cache->acquire({1, 2}, Deadline::after_ms(10));
    REQUIRE(!third.has_value());
    CHECK(third.error().code == ErrorCode::resource_exhausted);
    { ExpertLease ended = std::move(first).value(); }
    CHECK(cache->acquire({1, 2}, Cache::soon()).has_value());
}

TEST_CASE("the policy's decisions are the cache's") {
    for (const char* policy : {"lru", "rank-weighted"}) {
        CAPTURE(policy);
        Cache cache(options(24, policy));
        const std::size_t n_kept = cache->slots().n_kept;
        REQUIRE(n_kept == 20);
        auto alone = std::move(make_policy(policy, {kLayers, kExperts, n_kept})).value();
        std::mt19937 random(7);
        std::uint64_t hits = 0;
        for (std::uint32_t i = 0; i < 600; ++i) {
            const std::uint32_t layer = i % 4;  // 16 picks a round: LRU hits as well
            std::vector<std::uint32_t> experts(kExperts);
            std::iota(experts.begin(), experts.end(), 0U);
            std::shuffle(experts.begin(), experts.begin() + 8, random);  // some are hotter
            experts.resize(4);
            std::vector<ExpertUse> uses;
            for (std::uint32_t rank = 0; rank < 4; ++rank) uses.push_back({experts[rank], rank});
            alone->visit(layer, uses);
            std::vector<ExpertKey> missed;
            for (const ExpertUse& use : uses)
                if (alone->keeps({layer, use.expert}))
                    ++hits;
                else
                    missed.push_back({layer, use.expert});
            for (ExpertKey key : missed) alone->admit(key);
            if (i % 3 == 0) cache->prefetch(layer, std::vector<std::uint32_t>{experts[1], 15});
            cache.call(layer, experts);
        }
        CHECK(cache->counts().hits == hits);
        CHECK(hits > 0);
    }
}

TEST_CASE("never stale and never stuck, whatever threads do at the same time") {
    for (std::size_t n_slots : {4, 9, 40}) {
        CAPTURE(n_slots);
        Cache cache(options(n_slots));
        for (std::uint32_t expert = 0; expert < 3; ++expert)
            cache.store.fail({2, expert}, broken());
        std::atomic<bool> wrong{false};
        std::atomic<int> n_failed{0};
        auto work = [&](unsigned seed, bool calls) {
            std::mt19937 random(seed);
            for (int i = 0; i < 300; ++i) {
                const ExpertKey key{static_cast<std::uint32_t>(random() % kLayers),
                                    static_cast<std::uint32_t>(random() % kExperts)};
                const std::vector<std::uint32_t> hint{key.expert, (key.expert + 1) % kExperts};
                if (random() % 2 == 0) cache->prefetch(key.layer, hint);
                if (calls) {
                    std::vector<ExpertUse> uses{{key.expert, 0}, {(key.expert + 3) % kExperts, 2}};
                    cache.visit(key.layer, uses);
                }
                Result<ExpertLease> lease = cache->acquire(key, Cache::soon());
                if (!lease.has_value()) {
                    const bool faulty = key.layer == 2 && key.expert < 3;
                    if (!faulty || lease.error().code != ErrorCode::corrupt) wrong = true;
                    ++n_failed;
                } else if (!FakeStore::holds(lease->bytes(), key)) {
                    wrong = true;
                }
            }
        };
        {
            std::jthread first(work, 1U, true);
            std::jthread second(work, 2U, false);
            std::jthread third(work, 3U, false);
        }
        CHECK(!wrong);
        CHECK(n_failed > 0);
    }
}

TEST_CASE("what a former run kept is read in the background, one at a time") {
    std::vector<KeptExpert> kept;
    {
        Cache former(options(20));
        for (std::uint32_t layer = 1; layer < 5; ++layer) former.call(layer, {1, 2, 3});
        kept = former->kept();
        REQUIRE(kept.size() == 12);
    }
    kept.push_back({{kLayers, 0}, 1});  // of a larger model
    sort_by_value(kept);
    Cache cache(options(20));
    cache->warm(kept);
    while (cache->counts().warmed < 12) std::this_thread::yield();
    CHECK(cache.store.most_at_once() == 1);
    for (std::uint32_t layer = 1; layer < 5; ++layer) cache.call(layer, {1, 2, 3});
    CHECK(cache->counts().hits == 12);
    CHECK(cache->counts().misses == 0);
    CHECK(cache->counts().reads == 12);
}

TEST_CASE("warming takes what there is room for, best first, and nothing from calls") {
    Cache cache(options(8));
    const std::size_t n_kept = cache->slots().n_kept;
    REQUIRE(n_kept == 4);
    std::vector<KeptExpert> old;
    for (std::uint32_t expert = 0; expert < 10; ++expert)
        old.push_back({{1, expert}, 1 - 0.1 * expert});
    cache.store.close();
    cache->warm(old);
    cache.store.wait_for_reads(1);
    // A call does not wait for the list: its reads begin while the first of the list goes on, and
    // one that both want is read once.
    cache.visit(1, {{0, 0}, {12, 1}, {13, 2}});
    cache.store.wait_for_reads(3);
    CHECK(cache.store.most_at_once() == 3);
    cache.store.open();
    for (const std::uint32_t expert : {0U, 12U, 13U}) {
        const auto lease = cache->acquire({1, expert}, Cache::soon());
        REQUIRE(lease.has_value());
        CHECK(FakeStore::holds(lease->bytes(), {1, expert}));
    }
    while (cache->kept().size() < n_kept) std::this_thread::yield();
    CHECK(cache.store.reads({1, 0}) == 1);
    CHECK(cache.store.reads({1, 1}) == 1);
    CHECK(cache.store.reads({1, 9}) == 0);
    CHECK(cache->counts().warmed <= 2);
    cache.call(2, {1, 2, 3, 4, 5, 6});
}

TEST_CASE("an expert of the list that cannot be read is forgotten") {
    Cache cache(options(20));
    cache.store.fail({1, 0}, broken());
    cache->warm({{{1, 0}, 1}, {{1, 1}, 0.5}});
    while (cache->counts().warmed < 1) std::this_thread::yield();
    CHECK(cache->counts().failed_reads == 1);
    cache.store.heal({1, 0});
    cache.call(1, {0, 1});
    CHECK(cache->counts().hits == 1);
}
