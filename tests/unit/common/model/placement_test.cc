// Shares of routed experts: parsing, refusing, announcing.

#include "common/model/placement.h"

#include <doctest/doctest.h>

#include <string>

#include "tests/support/golden.h"

namespace k3::model {
namespace {

ModelConfig tiny_config() {
    auto config = load_config(test::golden_dir() / "tiny-k3");
    if (!config) FAIL(config.error().sentence());
    return std::move(config).value();
}

Placement parsed(const std::string& share) {
    auto placement = parse_share(share, tiny_config());
    if (!placement) FAIL(placement.error().sentence());
    return std::move(placement).value();
}

TEST_CASE("all means every expert of every layer that has experts") {
    Placement all = parsed("all");
    CHECK(all.count() == 12 * 24);
    CHECK(all.n_layers() == 13);
    CHECK(all.n_experts() == 24);
    CHECK(!all.holds(0, 0));
    CHECK(all.holds(1, 0));
    CHECK(all.holds(12, 23));
    CHECK(!all.holds(12, 24));
    CHECK(!all.holds(13, 0));
}

TEST_CASE("the stripes of N servers hold every expert exactly once, evenly") {
    const ModelConfig config = tiny_config();
    for (std::uint32_t n : {1U, 2U, 3U, 5U, 7U, 24U}) {
        CAPTURE(n);
        std::uint64_t total = 0;
        for (std::uint32_t i = 0; i < n; ++i) {
            Placement stripe = parsed(std::to_string(i) + "/" + std::to_string(n));
            total += stripe.count();
            CHECK(stripe.count() <= 12 * ((24 + n - 1) / n));
            for (std::uint32_t layer = 0; layer < config.n_layers; ++layer)
                for (std::uint32_t expert = 0; expert < 24; ++expert)
                    CHECK(stripe.holds(layer, expert) == (layer >= 1 && (expert + layer) % n == i));
        }
        CHECK(total == 12 * 24);
    }
}

TEST_CASE("lists name experts, layers, and products of both") {
    Placement experts = parsed("experts 0-7,12");
    CHECK(experts.count() == 12 * 9);
    CHECK(experts.holds(5, 7));
    CHECK(experts.holds(5, 12));
    CHECK(!experts.holds(5, 8));

    Placement layers = parsed("layers 1-4");
    CHECK(layers.count() == 4 * 24);
    CHECK(layers.holds(4, 23));
    CHECK(!layers.holds(5, 0));

    Placement both = parsed("layers 1-4 experts 0-7; layers 5-12 experts 8-23");
    CHECK(both.count() == 4 * 8 + 8 * 16);
    CHECK(both.holds(4, 7));
    CHECK(!both.holds(4, 8));
    CHECK(!both.holds(5, 7));
    CHECK(both.holds(5, 8));

    CHECK(parsed("experts 3 layers 2").count() == 1);
    CHECK(parsed("  experts 0 - 0 , 1  ").count() == 12 * 2);
    CHECK(parsed("experts 0-5; experts 3-7").count() == 12 * 8);  // a union counts once
}

TEST_CASE("a share that cannot be meant is refused with its text and the legal range") {
    struct Bad {
        const char* share;
        const char* part;
    };
    for (const Bad& bad :
         {Bad{"", "nothing is named"},
          Bad{"  ", "nothing is named"},
          Bad{"everything", "'everything' is neither 'layers' nor 'experts'"},
          Bad{"all experts", "'all' is neither"},
          Bad{"3/3", "I from 0 to N - 1"},
          Bad{"0/0", "needs N from 1 to 24"},
          Bad{"0/25", "needs N from 1 to 24"},
          Bad{"-1/3", "needs N from 1 to 24"},
          Bad{"1/", "needs N from 1 to 24"},
          Bad{"/3", "needs N from 1 to 24"},
          Bad{"1/3/5", "needs N from 1 to 24"},
          Bad{"experts 24", "'24' is not a number or range of experts from 0 to 23"},
          Bad{"experts 5-3", "'5-3' is not a number or range of experts from 0 to 23"},
          Bad{"experts 0-", "'0-' is not a number"},
          Bad{"experts -3", "'-3' is not a number"},
          Bad{"experts 0-1-2", "'0-1-2' is not a number"},
          Bad{"experts 0,,1", "'' is not a number"},
          Bad{"experts 99999999999", "'99999999999' is not a number"},
          Bad{"experts", "no numbers after 'experts'"},
          Bad{"experts 1 experts 2", "'experts' occurs twice"},
          Bad{"layers 0-3", "'0-3' is not a number or range of layers from 1 to 12"},
          Bad{"layers 13", "'13' is not a number or range of layers from 1 to 12"},
          Bad{"layers 1;", "a part is empty"},
          Bad{"layers 1; ; layers 2", "a part is empty"},
          Bad{"layers 1 expert 2", "'expert' is neither"}}) {
        CAPTURE(bad.share);
        auto placement = parse_share(bad.share, tiny_config());
        REQUIRE(!placement);
        const Error& error = placement.error();
        CAPTURE(error.message);
        CHECK(error.code == ErrorCode::invalid_argument);
        CHECK(error.message.find("share '" + std::string(bad.share) + "'") != std::string::npos);
        CHECK(error.message.find(bad.part) != std::string::npos);
        CHECK(!error.remedy.empty());
    }
}

TEST_CASE("holdings list the layers of which something is held, and agree bit by bit") {
    Placement placement = parsed("layers 2,11 experts 0,9,23");
    auto holdings = placement.holdings();
    REQUIRE(holdings.size() == 2);
    CHECK(holdings[0].layer == 2);
    CHECK(holdings[1].layer == 11);
    for (const msg::ExpertHolding& holding : holdings) {
        CHECK(holding.experts.size() == 3);
        for (std::uint32_t expert = 0; expert < 32; ++expert)
            CHECK(holding.holds(expert) == placement.holds(holding.layer, expert));
    }
    CHECK(Placement().holdings().empty());
    CHECK(Placement(13, 24).count() == 0);
}

}  // namespace
}  // namespace k3::model
