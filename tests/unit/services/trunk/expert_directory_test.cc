// Who holds which expert: what is refused, how holders are chosen.

#include "services/trunk/expert_directory.h"

#include <doctest/doctest.h>

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
    CHECK(known.choose(4, 1, 0b11) == 1);
    CHECK(known.choose(5, 1, 0b11) == 0);
    CHECK(known.choose(5, 1, 0b10) == ExpertDirectory::kNobody);
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
            const std::size_t server = known.choose(layer, e, 0b111);
            ++load[server];
            CHECK(server == known.choose(layer, e, 0b111));
            CHECK(known.choose(layer, e, 0b100) == 2);
        }
    for (int n : load) CHECK(n == 10);
    // The third comes back with a smaller share: its old one is forgotten.
    CHECK(known.admit(2, holder("e", 0, 5)).has_value());
    CHECK(known.choose(4, 0, 0b100) == ExpertDirectory::kNobody);
    CHECK(known.choose(4, 6, 0b100) == 2);
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
