#include "services/gateway/compatibility.h"

#include <doctest/doctest.h>

#include <functional>
#include <string>
#include <utility>
#include <vector>

namespace k3::gateway {

namespace {

struct Announced {
    msg::Announcement tokenizer;
    std::vector<msg::Announcement> trunk;
    msg::Announcement sampler;

    msg::TrunkFacts& facts(std::size_t i) { return std::get<msg::TrunkFacts>(trunk[i].facts); }
};

/// Layers 0-3, 4-8 and 9-12 of 13.
Announced three_stages() {
    Announced out;
    out.tokenizer.kind = msg::ServiceKind::tokenizer;
    out.tokenizer.name = "tokenizer";
    out.tokenizer.fingerprint = "aa";
    out.tokenizer.facts = msg::TokenizerFacts{768, 512, {513, 514}};
    out.sampler.kind = msg::ServiceKind::sampler;
    out.sampler.name = "sampler";
    out.sampler.facts = msg::SamplerFacts{64};
    const std::uint32_t cuts[] = {0, 4, 9, 13};
    for (std::uint32_t i = 0; i < 3; ++i) {
        msg::Announcement stage;
        stage.kind = msg::ServiceKind::trunk;
        stage.name = "trunk-" + std::to_string(i);
        stage.fingerprint = "aa";
        msg::TrunkFacts facts;
        facts.first_layer = cuts[i];
        facts.n_layers = cuts[i + 1] - cuts[i];
        facts.total_layers = 13;
        facts.hidden_size = 80;
        facts.vocab_size = 768;
        facts.max_positions = 1000 - i;
        facts.max_step_rows = 512 + i;
        facts.max_sessions = 8 + i;
        facts.in_vectors = i == 0 ? 0 : i + 2;
        facts.out_vectors = i == 2 ? 0 : i + 3;
        stage.facts = facts;
        out.trunk.push_back(stage);
    }
    return out;
}

Result<PipelineFacts> check(const Announced& stages) {
    return check_stages(stages.tokenizer, stages.trunk, stages.sampler);
}

}  // namespace

TEST_CASE("fitting stages give the smallest of their limits") {
    const auto facts = check(three_stages());
    REQUIRE(facts);
    CHECK(facts->max_positions == 998);
    CHECK(facts->max_step_rows == 512);
    CHECK(facts->max_sessions == 8);
    CHECK(facts->max_sample_rows == 64);
    CHECK(facts->vocab_size == 768);
    CHECK(facts->hidden_size == 80);
    CHECK(facts->fingerprint == "aa");
    CHECK(facts->stop_ids == std::vector<std::uint32_t>{513, 514});
}

TEST_CASE("one stage with all layers fits too") {
    Announced stages = three_stages();
    stages.trunk.resize(1);
    stages.facts(0).n_layers = 13;
    stages.facts(0).out_vectors = 0;
    CHECK(check(stages));
}

TEST_CASE("a tokenizer without a fingerprint is believed") {
    Announced stages = three_stages();
    stages.tokenizer.fingerprint.clear();
    CHECK(check(stages));
}

TEST_CASE("stages that do not belong together are refused, naming both") {
    using Names = std::vector<std::string>;
    const struct {
        std::string what;
        std::function<void(Announced&)> change;
        Names names;
    } cases[] = {
        {"another checkpoint",
         [](Announced& s) { s.trunk[1].fingerprint = "bb"; },
         {"'trunk-0'", "'trunk-1'", "aa", "bb"}},
        {"no fingerprint",
         [](Announced& s) { s.trunk[2].fingerprint = ""; },
         {"'trunk-1'", "'trunk-2'", "aa", "none"}},
        {"another tokenizer",
         [](Announced& s) { s.tokenizer.fingerprint = "cc"; },
         {"'tokenizer'", "'trunk-0'", "cc", "aa"}},
        {"another vocabulary",
         [](Announced& s) { std::get<msg::TokenizerFacts>(s.tokenizer.facts).vocab_size = 700; },
         {"'tokenizer'", "'trunk-0'", "700", "768"}},
        {"another vocabulary between stages",
         [](Announced& s) { s.facts(1).vocab_size = 769; },
         {"'trunk-0'", "'trunk-1'", "768", "769"}},
        {"another width",
         [](Announced& s) { s.facts(2).hidden_size = 81; },
         {"'trunk-1'", "'trunk-2'", "80", "81"}},
        {"another total",
         [](Announced& s) { s.facts(1).total_layers = 14; },
         {"'trunk-0'", "'trunk-1'", "13", "14"}},
        {"a gap",
         [](Announced& s) { s.facts(1).first_layer = 5; },
         {"'trunk-0'", "'trunk-1'", "0-3", "5-9"}},
        {"an overlap",
         [](Announced& s) { s.facts(1).first_layer = 3; },
         {"'trunk-0'", "'trunk-1'", "0-3", "3-7"}},
        {"the wrong order",
         [](Announced& s) { std::swap(s.trunk[0], s.trunk[1]); },
         {"'trunk-1'", "'trunk-0'", "4-8", "0-3"}},
        {"a missing first stage",
         [](Announced& s) { s.trunk.erase(s.trunk.begin()); },
         {"'trunk-1'", "layer 4"}},
        {"a missing last stage",
         [](Announced& s) { s.trunk.pop_back(); },
         {"'trunk-1'", "4-8 of 13", "12"}},
        {"rows of another width",
         [](Announced& s) { s.facts(1).in_vectors = 4; },
         {"'trunk-0'", "'trunk-1'", "3", "4"}},
        {"latents kept in another way",
         [](Announced& s) { s.facts(1).mla_bf16 = true; },
         {"'trunk-0'", "'trunk-1'", "fp32", "bf16"}},
        {"a sampler in the tokenizer's place",
         [](Announced& s) { s.tokenizer = s.sampler; },
         {"tokenizer", "'sampler'"}},
        {"a tokenizer in the trunk's place",
         [](Announced& s) { s.trunk[1] = s.tokenizer; },
         {"trunk", "'tokenizer'"}},
        {"a trunk in the sampler's place",
         [](Announced& s) { s.sampler = s.trunk[0]; },
         {"sampler", "'trunk-0'"}},
        {"no layers", [](Announced& s) { s.facts(0).n_layers = 0; }, {"'trunk-0'", "0 layers"}},
        {"no rows", [](Announced& s) { s.facts(2).max_step_rows = 0; }, {"'trunk-2'", "0 rows"}},
        {"no sampler rows",
         [](Announced& s) { std::get<msg::SamplerFacts>(s.sampler.facts).max_rows = 0; },
         {"'sampler'", "0 rows"}},
        {"facts that are missing",
         [](Announced& s) { s.trunk[0].facts = std::monostate{}; },
         {"trunk", "'trunk-0'"}},
        {"layers beyond 32 bits",
         [](Announced& s) { s.facts(2).n_layers = 0xFFFFFFFFU; },
         {"'trunk-2'"}},
    };
    for (const auto& c : cases) {
        Announced stages = three_stages();
        c.change(stages);
        const auto facts = check(stages);
        CAPTURE(c.what);
        REQUIRE_FALSE(facts);
        CHECK(facts.error().code == ErrorCode::incompatible);
        CHECK_FALSE(facts.error().remedy.empty());
        for (const std::string& name : c.names) {
            CAPTURE(facts.error().message);
            CHECK(facts.error().message.find(name) != std::string::npos);
        }
    }
}

TEST_CASE("a pipeline without a trunk is refused") {
    Announced stages = three_stages();
    stages.trunk.clear();
    CHECK_FALSE(check(stages));
}

}  // namespace k3::gateway
