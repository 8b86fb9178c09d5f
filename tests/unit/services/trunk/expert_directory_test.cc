// Who holds which expert: what is refused, how holders are chosen.

#include "services/trunk/expert_directory.h"

#include <doctest/doctest.h>

#include <algorithm>
#include <string>
#include <vector>

#include "tests/support/text.h"

namespace k3::test {

namespace {

using trunk::ExpertDirectory;

/// 3 layers from 4 on, 10 experts each.
ExpertDirectory directory(std::size_t n_servers) {
    std::vector<std::string> endpoints;
    for (std::size_t s = 0; s < n_servers; ++s)
        endpoints.push_back("ipc:///tmp/e" + std::to_string(s));
    return {{"trunk-1", "aaaa", 4, 3, 10, 64}, endpoints};
}

/// Holds expert e of layer L if (e + L) % of == i.
msg::Announcement holder(const std::string& name, std::uint32_t i, std::uint32_t of) {
    msg::Announcement announcement;
    announcement.kind = msg::ServiceKind::experts;
    announcement.name = name;
    announcement.fingerprint = "aaaa";
    msg::ExpertFacts facts{10, 64, {}, 32};
    for (std::uint32_t layer = 0; layer < 9; ++layer) {
        msg::ExpertHolding holding{layer, {0, 0}};
        for (std::uint32_t e = 0; e < 10; ++e)
            if ((e + layer) % of == i)
                holding.experts[e / 8] =
                    static_cast<std::uint8_t>(holding.experts[e / 8] | 1U << e % 8);
        facts.holdings.push_back(holding);
    }
    announcement.facts = facts;
    return announcement;
}

using Servers = std::vector<std::uint8_t>;

/// Of a call with these picks, all of them wanted; one row unless `top_k` says otherwise.
Servers chosen(ExpertDirectory& known, std::uint32_t layer, const std::vector<std::uint32_t>& ids,
               std::uint64_t available, std::size_t top_k = 0, std::uint64_t avoided = 0) {
    if (top_k == 0) top_k = ids.size();
    Servers servers(ids.size());
    known.choose({layer, ids.size() / top_k, top_k, ids.data(), nullptr},
                 std::vector<bool>(ids.size(), true), available, avoided, servers);
    return servers;
}

}  // namespace

TEST_CASE("two halves cover everything, one half does not, and the sentence says what is missing") {
    ExpertDirectory known = directory(2);
    CHECK(known.admit(0, holder("experts-0", 0, 2)).has_value());
    const Status uncovered = known.check_coverage();
    REQUIRE(!uncovered.has_value());
    CHECK(uncovered.error().code == ErrorCode::incompatible);
    CHECK(contains(uncovered.error().message, "15 of 30 experts"));
    CHECK(contains(uncovered.error().message,
                   "layer 4 expert 1, layer 4 expert 3, layer 4 expert 5, ..."));
    CHECK(contains(uncovered.error().message, "experts-0 (ipc:///tmp/e0)"));
    CHECK(contains(uncovered.error().message, "ipc:///tmp/e1"));
    CHECK(known.admit(1, holder("experts-1", 1, 2)).has_value());
    CHECK(known.check_coverage().has_value());
    CHECK(chosen(known, 4, {1}, 0b11) == Servers{1});
    CHECK(chosen(known, 5, {1}, 0b11) == Servers{0});
    CHECK(chosen(known, 5, {1}, 0b10) == Servers{ExpertDirectory::kNobody});
    CHECK(known.is_held(5, 1, 0b11));
    CHECK(!known.is_held(5, 1, 0b10));
}

TEST_CASE("without any server the sentence says so") {
    const Status uncovered = directory(0).check_coverage();
    REQUIRE(!uncovered.has_value());
    CHECK(contains(uncovered.error().message, "no expert server was named"));
}

TEST_CASE("another checkpoint is refused with both fingerprints and both names") {
    ExpertDirectory known = directory(1);
    msg::Announcement other = holder("experts-0", 0, 1);
    other.fingerprint = "bbbb";
    const Status refused = known.admit(0, other);
    REQUIRE(!refused.has_value());
    CHECK(refused.error().code == ErrorCode::incompatible);
    for (const char* part : {"experts-0 (ipc:///tmp/e0)", "bbbb", "trunk-1", "aaaa"})
        CHECK(contains(refused.error().message, part));
    CHECK(!known.check_coverage().has_value());
}

TEST_CASE("a service of another kind and other sizes are refused") {
    ExpertDirectory known = directory(1);
    msg::Announcement sampler;
    sampler.kind = msg::ServiceKind::sampler;
    sampler.name = "sampler";
    CHECK(contains(known.admit(0, sampler).error().message, "is a sampler service"));
    msg::Announcement wide = holder("experts-0", 0, 1);
    std::get<msg::ExpertFacts>(wide.facts).latent_size = 128;
    CHECK(contains(known.admit(0, wide).error().message, "128"));
    msg::Announcement idle = holder("experts-0", 0, 1);
    std::get<msg::ExpertFacts>(idle.facts).max_call_rows = 0;
    CHECK(known.admit(0, idle).error().code == ErrorCode::incompatible);
}

TEST_CASE("holdings outside the model are ignored and short bit sets hold nothing more") {
    ExpertDirectory known = directory(1);
    msg::Announcement odd = holder("experts-0", 0, 1);
    auto& facts = std::get<msg::ExpertFacts>(odd.facts);
    facts.holdings.push_back({4000000000U, {0xFF}});
    facts.holdings[5].experts.resize(1);
    CHECK(known.admit(0, odd).has_value());
    CHECK(contains(known.check_coverage().error().message, "2 of 30 experts"));
}

TEST_CASE("replicas share the work evenly, and what one held alone is lost with it") {
    ExpertDirectory known = directory(3);
    for (std::size_t s = 0; s < 3; ++s) CHECK(known.admit(s, holder("e", 0, 1)).has_value());
    std::vector<int> load(3);
    for (std::uint32_t layer = 4; layer < 7; ++layer)
        for (std::uint32_t e = 0; e < 10; ++e) {
            const Servers servers = chosen(known, layer, {e}, 0b111);
            ++load[servers[0]];
            CHECK(servers == chosen(known, layer, {e}, 0b111));
            CHECK(chosen(known, layer, {e}, 0b100) == Servers{2});
        }
    for (int n : load) CHECK((n >= 7 && n <= 13));
    // The third comes back with a smaller share: its old one is forgotten.
    CHECK(known.admit(2, holder("e", 0, 5)).has_value());
    CHECK(chosen(known, 4, {0, 6}, 0b100) == Servers{ExpertDirectory::kNobody, 2});
}

TEST_CASE("the picks of a call are spread evenly, those of an expert stay together") {
    ExpertDirectory known = directory(2);
    for (std::size_t s = 0; s < 2; ++s) CHECK(known.admit(s, holder("e", 0, 1)).has_value());
    // Experts that all would go to the same server, if it were not for the others.
    std::vector<std::uint32_t> first;
    for (std::uint32_t e = 0; e < 10 && first.size() < 4; ++e)
        if (chosen(known, 4, {e}, 0b11) == Servers{0}) first.push_back(e);
    REQUIRE(first.size() == 4);
    CHECK(chosen(known, 4, first, 0b11) == Servers{0, 0, 1, 1});
    CHECK(chosen(known, 4, first, 0b10) == Servers{1, 1, 1, 1});
    // Two rows of three picks; one expert is wanted by both.
    const Servers rows =
        chosen(known, 4, {first[0], first[1], 9, first[1], first[2], first[3]}, 0b11, 3);
    CHECK(rows[1] == rows[3]);
    const auto n = std::count(rows.begin(), rows.end(), std::uint8_t{0}) - (rows[1] == 0 ? 1 : 0);
    CHECK((n == 2 || n == 3));
}

TEST_CASE("a server that announces twice the weight is given twice as many") {
    ExpertDirectory known = directory(2);
    msg::Announcement strong = holder("strong", 0, 1);
    std::get<msg::ExpertFacts>(strong.facts).weight = 2;
    CHECK(known.admit(0, holder("weak", 0, 1)).has_value());
    CHECK(known.admit(1, strong).has_value());
    const Servers servers = chosen(known, 4, {0, 1, 2, 3, 4, 5, 6, 7, 8}, 0b11);
    CHECK(std::count(servers.begin(), servers.end(), std::uint8_t{1}) == 6);
}

TEST_CASE("one that is avoided gets what it holds alone, and nothing else") {
    ExpertDirectory known = directory(3);
    REQUIRE(known.admit(0, holder("experts-0", 0, 1)).has_value());
    REQUIRE(known.admit(1, holder("experts-1", 0, 2)).has_value());
    for (std::uint32_t layer : {4U, 5U}) {
        const Servers servers = chosen(known, layer, {0, 1, 2, 3}, 0b011, 4, 0b001);
        for (std::uint32_t expert : {0U, 1U, 2U, 3U}) {
            CAPTURE(expert);
            CHECK(servers[expert] == (known.is_held(layer, expert, 0b010) ? 1 : 0));
        }
        CHECK(std::count(servers.begin(), servers.end(), 0) == 2);
    }
    // All are avoided: as if none was.
    CHECK(chosen(known, 4, {0, 1, 2, 3}, 0b011, 4, 0b111) == chosen(known, 4, {0, 1, 2, 3}, 0b011));
}

TEST_CASE("only wanted picks are given to anybody") {
    ExpertDirectory known = directory(1);
    CHECK(known.admit(0, holder("e", 0, 1)).has_value());
    const std::vector<std::uint32_t> ids = {3, 5};
    Servers servers(2);
    known.choose({4, 2, 1, ids.data(), nullptr}, {false, true}, 1, 0, servers);
    CHECK(servers == Servers{ExpertDirectory::kNobody, 0});
}

TEST_CASE("the first build of a server is as good as any, another one later is not") {
    ExpertDirectory known = directory(2);
    msg::Announcement announcement = holder("experts-0", 0, 2);
    announcement.build = "1234";
    CHECK(known.admit(0, announcement).has_value());
    msg::Announcement other = holder("experts-1", 1, 2);
    other.build = "5678";
    CHECK(known.admit(1, other).has_value());
    CHECK(known.is_covered_by(0b11));
    CHECK_FALSE(known.is_covered_by(0b01));
    CHECK(known.admit(0, announcement).has_value());
    announcement.build = "abcd";
    const Status refused = known.admit(0, announcement);
    REQUIRE(!refused.has_value());
    CHECK(refused.error().code == ErrorCode::incompatible);
    CHECK(contains(refused.error().message, "another build (abcd) than it had been (1234)"));
    CHECK_FALSE(known.is_covered_by(0b11));
    announcement.build.clear();
    CHECK(contains(known.admit(0, announcement).error().message, "of unknown id"));
}

}  // namespace k3::test
