#include "common/model/memory_plan.h"

#include <doctest/doctest.h>

#include <filesystem>
#include <limits>

#include "common/model/model_sizes.h"
#include "common/model/synthetic.h"
#include "common/transport/arena.h"

namespace k3::model {

namespace {

ModelConfig released_config() {
    auto plan = plan_synthetic(kReleasedSize);
    REQUIRE(plan.has_value());
    return plan->config;
}

}  // namespace

TEST_CASE("a session of the released model has the bytes of the description") {
    const ModelConfig config = released_config();
    const SessionSize size = session_size(config, {0, config.n_layers}, 0);
    CHECK(size.kda_matrix_bytes == 434'110'464);
    CHECK(size.kda_history_bytes == 7'630'848 * 4);
    CHECK(size.fixed_bytes == size.kda_matrix_bytes + size.kda_history_bytes);
    CHECK(size.latent_bytes == 55'296);
    CHECK(size.position_bytes == 55'296);
    CHECK(size.bytes(1'048'576) - size.fixed_bytes == 57'982'058'496);  // 58.0 GB
    // Every thread has a score for each position.
    CHECK(session_size(config, {0, config.n_layers}, 8).position_bytes == 55'296 + 32);
    ModelConfig rounded = config;
    rounded.mla.cache = MlaCache::bf16;
    CHECK(session_size(rounded, {0, config.n_layers}, 8).latent_bytes == 55'296 / 2);
    CHECK(session_size(rounded, {0, config.n_layers}, 8).fixed_bytes == size.fixed_bytes);
    CHECK(size.bytes(std::numeric_limits<std::uint64_t>::max()) ==
          std::numeric_limits<std::uint64_t>::max());
    // A range without MLA layers keeps nothing for each position.
    CHECK(session_size(config, {0, 3}, 8).bytes(1'000'000) == 3 * (6'291'456 + 442'368));
}

TEST_CASE("the stages of a pipeline hold each weight once") {
    const ModelConfig config = released_config();
    const std::uint64_t whole = resident_weight_bytes(config, {0, 93});
    CHECK(whole ==
          resident_weight_bytes(config, {0, 40}) + resident_weight_bytes(config, {40, 53}));
    const std::uint64_t stored = model_sizes(config).resident.bytes;
    CHECK(whole > stored);  // vectors are widened
    CHECK(whole < stored + stored / 1000);

    const auto all = trunk_weight_size(config, {0, 93}, 0);
    REQUIRE(all.has_value());
    CHECK(all->kept_bytes == whole);
    CHECK(all->ring_bytes + all->token_bytes == 0);
    const auto some = trunk_weight_size(config, {0, 93}, 20'000'000'000);
    REQUIRE(some.has_value());
    CHECK(some->kept_bytes + some->ring_bytes <= 20'000'000'000);
    CHECK(some->ring_bytes > 0);
    CHECK(some->token_bytes > stored - 2'400'000'000 - 20'000'000'000);  // an embedding's row only
    CHECK_FALSE(trunk_weight_size(config, {0, 93}, 1000).has_value());
}

TEST_CASE("a slot holds a record wherever it begins in a block") {
    CHECK(expert_slot_bytes(1) == 4096);
    CHECK(expert_slot_bytes(2) == 8192);
    CHECK(expert_slot_bytes(17'547'264) == 17'547'264 + 4096);
}

TEST_CASE("cache_bytes of an expert server buys slots, after the buffers of a disk cache") {
    ExpertMemoryOptions options;
    options.slot_bytes = 100;
    options.n_held = 10;
    options.free_bytes = 2000;
    CHECK(expert_memory(options)->n_slots == 5);  // a quarter of what is free
    options.free_bytes = 1'000'000;
    CHECK(expert_memory(options)->n_slots == 10);
    options.buffer_bytes = 250;
    CHECK(expert_memory(options)->bytes == 1250);
    options.free_bytes = 2000;
    CHECK(expert_memory(options)->n_slots == 2);
    options.cache_bytes = 750;
    CHECK(expert_memory(options)->n_slots == 5);
    CHECK(expert_memory(options)->bytes == 750);
    options.cache_bytes = 449;
    const Error error = expert_memory(options).error();
    CHECK(error.code == ErrorCode::resource_exhausted);
    CHECK(error.remedy.find("450") != std::string::npos);
    options.n_held = 1;
    CHECK(expert_memory(options)->n_slots == 1);
}

TEST_CASE("an arena takes the planned bytes of shared memory") {
    for (const ArenaSize& size : {ArenaSize{1, 1}, ArenaSize{5000, 3}, ArenaSize{4096, 70}}) {
        const std::string name = transport::segment_name(7, "memory-plan-test");
        auto arena = transport::Arena::create({name, size.slot_bytes, size.n_slots});
        REQUIRE(arena.has_value());
        CHECK(std::filesystem::file_size("/dev/shm" + name) == size.bytes());
    }
}

}  // namespace k3::model
