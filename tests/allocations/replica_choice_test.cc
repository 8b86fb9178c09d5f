// Choosing among replicas takes no memory, for one row or for a full step.

#include <doctest/doctest.h>

#include <cstdint>
#include <string>
#include <vector>

#include "services/trunk/expert_directory.h"
#include "tests/allocations/counter.h"

namespace k3::test {

TEST_CASE("the servers of a layer's picks are chosen without allocating") {
    constexpr std::uint32_t kExperts = 896;
    constexpr std::size_t kServers = 8;
    constexpr std::size_t kTopK = 16;
    trunk::ExpertDirectory directory(
        {"trunk", "aaaa", 1, 1, kExperts, 64},
        std::vector<std::string>(kServers, "ipc:///tmp/k3-nobody.sock"));
    for (std::size_t s = 0; s < kServers; ++s) {
        msg::Announcement announcement;
        announcement.kind = msg::ServiceKind::experts;
        announcement.fingerprint = "aaaa";
        msg::ExpertHolding holding{1, std::vector<std::uint8_t>(kExperts / 8)};
        for (std::uint32_t e = 0; e < kExperts; ++e)
            if (e % kServers == s || e * 7 % kServers == s)
                holding.experts[e / 8] =
                    static_cast<std::uint8_t>(holding.experts[e / 8] | 1U << e % 8);
        announcement.facts = msg::ExpertFacts{kExperts, 64, {holding}, 512};
        REQUIRE(directory.admit(s, announcement).has_value());
    }
    for (const std::size_t n_rows : {1U, 512U}) {
        CAPTURE(n_rows);
        std::vector<std::uint32_t> ids(n_rows * kTopK);
        for (std::size_t i = 0; i < ids.size(); ++i)
            ids[i] = static_cast<std::uint32_t>(i / kTopK * 5 + i % kTopK * 56) % kExperts;
        const std::vector<bool> wanted(ids.size(), true);
        std::vector<std::uint8_t> servers(ids.size());
        const std::size_t before = n_allocations();
        directory.choose({1, n_rows, kTopK, ids.data(), nullptr}, wanted, 0xFF, 0b101, servers);
        CHECK(n_allocations() == before);
        for (std::uint8_t server : servers) CHECK(server < kServers);
    }
}

}  // namespace k3::test
