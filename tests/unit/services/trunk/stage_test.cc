// Steps that fail, and how the stage reports them.

#include "services/trunk/stage.h"

#include <doctest/doctest.h>

#include <cmath>
#include <string>
#include <vector>

#include "tests/support/text.h"
#include "tests/unit/services/trunk/harness.h"

namespace k3::test {

namespace {}  // namespace

TEST_CASE("a failed step poisons exactly the sessions it names") {
    Harness trunk(tiny_model());
    for (std::uint64_t id : {1, 2, 3}) trunk.open(id);
    const auto before = trunk.feed(3, {5, 6, 7}, 3);
    trunk.experts().fault = [](std::uint32_t layer) -> Status {
        if (layer != 5) return Status::ok();
        return Error{ErrorCode::corrupt, "layer 5 expert 3 in model-2: scale byte 255",
                     "restore it"};
    };
    const auto failed = trunk.step({{1, 5}, {2, 5}, {1, 6}}, {2});
    REQUIRE(!failed.has_value());
    CHECK(failed.error().code == ErrorCode::corrupt);
    CHECK(failed.error().message == "layer 5 expert 3 in model-2: scale byte 255");
    trunk.experts().fault = nullptr;

    for (std::uint64_t id : {1, 2}) {
        const auto again = trunk.step({{id, 5}}, {0});
        REQUIRE(!again.has_value());
        CHECK(again.error().code == ErrorCode::unavailable);
        CHECK(contains(again.error().message, "scale byte 255"));
        trunk.drop(id);
    }
    // The bystander goes on, and a new session under the old number gives the same bytes.
    CHECK(trunk.step({{3, 8}}, {0}).has_value());
    trunk.open(1);
    CHECK(trunk.feed(1, {5, 6, 7}, 3) == before);
}

TEST_CASE("a value that is not finite ends the step with the place, not with a token") {
    Harness trunk(tiny_model());
    trunk.open(1);
    trunk.feed(1, {5, 6, 7}, 3);
    trunk.session(1, 4).kda(4, 1).matrix[9] = std::nanf("");
    const auto failed = trunk.step({{1, 8}}, {0});
    REQUIRE(!failed.has_value());
    CHECK(failed.error().code == ErrorCode::corrupt);
    CHECK(contains(failed.error().message, "layer 4"));
    CHECK(contains(failed.error().message, "session 1, position 3"));
}

TEST_CASE("the router's choice is announced before every expert call") {
    Harness trunk(tiny_model());
    trunk.open(1);
    trunk.feed(1, {5, 6, 7}, 2);
    CHECK(trunk.experts().n_prefetches == 2 * 12);
}

TEST_CASE("weights load with progress, and loading stops when asked") {
    const model::Model& model = tiny_model();
    std::vector<std::string> parts;
    std::uint64_t last = 0;
    std::uint64_t total = 0;
    auto watch = [&](std::uint64_t done, std::uint64_t all, const std::string& what) {
        CHECK(done >= last);
        CHECK(done < all);
        last = done;
        total = all;
        parts.push_back(what);
        return true;
    };
    auto loaded = trunk::RamWeights::load(*model.checkpoint, model.config, {11, 2}, watch);
    REQUIRE(loaded.has_value());
    CHECK(parts == std::vector<std::string>{"layer 11", "layer 12", "output head"});
    CHECK((*loaded)->bytes() >= total);

    auto stopped = trunk::RamWeights::load(
        *model.checkpoint, model.config, {0, 13},
        [](std::uint64_t, std::uint64_t, const std::string& what) { return what != "layer 2"; });
    REQUIRE(!stopped.has_value());
    CHECK(stopped.error().code == ErrorCode::cancelled);
    CHECK(contains(stopped.error().message, "layer 2"));
}

TEST_CASE("only the meaningful entries of A_log are used, and queries are folded") {
    const model::Model& model = tiny_model();
    auto loaded = trunk::RamWeights::load(*model.checkpoint, model.config, {0, 1}, nullptr);
    REQUIRE(loaded.has_value());
    const trunk::LayerWeights& layer = (*loaded)->layer(0);
    CHECK(layer.kda.exp_a_log.size() == model.config.kda.n_heads);
    for (float value : layer.kda.exp_a_log) CHECK(value > 0.0F);
    CHECK(layer.mlp_query.size() == model.config.hidden_size);
    CHECK(!layer.is_moe);
}

}  // namespace k3::test
