// The list of kept experts as a file, and that each policy takes up where it left.

#include "services/experts/kept_experts.h"

#include <doctest/doctest.h>

#include <algorithm>
#include <string>
#include <vector>

#include "common/experts/eviction_policy.h"
#include "tests/support/checkpoint_copy.h"
#include "tests/support/text.h"

using namespace k3;
using namespace k3::experts;

namespace {

const std::string kOurs = "0123456789abcdef0123456789abcdef";

KeptExperts some_kept() {
    return {kOurs, "rank-weighted", {{{1, 5}, 0.25}, {{92, 895}, 0.65}, {{3, 0}, 0}}};
}

bool same(const std::vector<KeptExpert>& a, const std::vector<KeptExpert>& b) {
    return std::equal(a.begin(), a.end(), b.begin(), b.end(),
                      [](const KeptExpert& x, const KeptExpert& y) {
                          return x.key == y.key && x.value == y.value;
                      });
}

std::vector<KeptExpert> sorted(std::vector<KeptExpert> experts) {
    sort_by_value(experts);
    return experts;
}

}  // namespace

TEST_CASE("what is kept is read back as it was saved") {
    const test::TempDir dir;
    const auto path = dir.path() / "warm";
    CHECK(load_kept(path, kOurs, "rank-weighted").error().code == ErrorCode::not_found);
    for (int round = 0; round < 2; ++round) {  // new, and in the place of an old one
        REQUIRE(save_kept(path, some_kept()).has_value());
        const auto kept = load_kept(path, kOurs, "rank-weighted");
        REQUIRE_MESSAGE(kept.has_value(), (kept.has_value() ? "" : kept.error().sentence()));
        CHECK(same(kept->experts, some_kept().experts));
        CHECK(std::filesystem::file_size(path) == kept_file_bytes(3));
    }
    REQUIRE(save_kept(path, {kOurs, "lru", {}}).has_value());
    CHECK(load_kept(path, kOurs, "lru")->experts.empty());
    CHECK(!save_kept(dir.path() / "nowhere" / "warm", some_kept()).has_value());
}

TEST_CASE("a list of another checkpoint or policy is refused by both names") {
    const test::TempDir dir;
    const auto path = dir.path() / "warm";
    REQUIRE(save_kept(path, some_kept()).has_value());
    const std::string other(32, 'f');
    const Error error = load_kept(path, other, "rank-weighted").error();
    CHECK(error.code == ErrorCode::incompatible);
    CHECK(test::contains(error.sentence(), other));
    CHECK(test::contains(error.sentence(), kOurs));
    CHECK(load_kept(path, kOurs, "lru").error().code == ErrorCode::incompatible);
}

TEST_CASE("a list with a bit of any byte flipped, or cut anywhere, is refused") {
    const test::TempDir dir;
    const auto path = dir.path() / "warm";
    REQUIRE(save_kept(path, some_kept()).has_value());
    const std::string good = test::read_file(path);
    for (std::size_t at = 0; at < good.size(); ++at) {
        CAPTURE(at);
        std::string bad = good;
        bad[at] = static_cast<char>(bad[at] ^ (1 << at % 8));
        test::write_file(path, bad);
        REQUIRE(load_kept(path, kOurs, "rank-weighted").error().code == ErrorCode::corrupt);
    }
    for (std::size_t bytes = 0; bytes < good.size(); ++bytes) {
        CAPTURE(bytes);
        test::write_file(path, good.substr(0, bytes));
        REQUIRE(load_kept(path, kOurs, "rank-weighted").error().code == ErrorCode::corrupt);
    }
    test::write_file(path, good + good);
    CHECK(load_kept(path, kOurs, "rank-weighted").error().code == ErrorCode::corrupt);
}

TEST_CASE("a policy takes up the values and the order of an earlier one") {
    for (const char* name : {"rank-weighted", "lru"}) {
        CAPTURE(name);
        const EvictionPolicy::Shape shape{4, 32, 8};
        auto first = make_policy(name, shape).value();
        for (std::uint32_t i = 0; i < 12; ++i) {
            const ExpertUse use{i * 5 % 32, i % 7};
            first->visit(1 + i % 3, {&use, 1});
            first->admit({1 + i % 3, use.expert});
        }
        const std::vector<KeptExpert> kept = sorted(first->kept());
        REQUIRE(kept.size() == 8);

        auto second = make_policy(name, shape).value();
        for (const KeptExpert& expert : kept) CHECK(second->restore(expert));
        CHECK(same(sorted(second->kept()), kept));
        CHECK(second->restore(kept[3]));          // it is there
        CHECK(!second->restore({{3, 31}, 0.9}));  // there is no room
        CHECK(second->size() == 8);

        // From here on both decide alike.
        for (std::uint32_t i = 0; i < 60; ++i) {
            const ExpertUse use{i * 11 % 32, i % 5};
            const ExpertKey key{1 + i % 3, use.expert};
            first->visit(key.layer, {&use, 1});
            second->visit(key.layer, {&use, 1});
            REQUIRE(first->keeps(key) == second->keeps(key));
            if (first->keeps(key)) continue;
            const auto a = first->admit(key);
            const auto b = second->admit(key);
            REQUIRE(a.admitted == b.admitted);
            REQUIRE(a.evicts == b.evicts);
            REQUIRE(a.evicted == b.evicted);
        }

        auto smaller = make_policy(name, {4, 32, 3}).value();
        for (const KeptExpert& expert : kept) smaller->restore(expert);
        for (std::size_t i = 0; i < kept.size(); ++i) CHECK(smaller->keeps(kept[i].key) == (i < 3));
    }
}
