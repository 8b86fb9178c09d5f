// A call of an expert server takes no memory: the cache took its slots at start, the executor and
// the groups their scratch.
//
// Counted is all that k3-experts computes for a decoded ExpertCall or Prefetch, with the cache's
// reader threads. Outside, and counted in messages_test.cc: the messages themselves.

#include <doctest/doctest.h>

#include <cstddef>
#include <memory>
#include <span>
#include <vector>

#include "common/kernels/parallel.h"
#include "common/model/load.h"
#include "services/experts/executor.h"
#include "services/experts/expert_cache.h"
#include "services/experts/expert_store.h"
#include "services/experts/pick_groups.h"
#include "tests/allocations/counter.h"
#include "tests/support/golden.h"

namespace k3::test {

namespace {

using experts::ExpertCache;

constexpr std::uint32_t kCallRows = 8;

/// An expert server of tiny-k3 without its messages.
struct ExpertServer {
    model::Model model = model::open_model(golden_dir() / "tiny-k3").value();
    model::Placement held = model::parse_share("all", model.config).value();
    std::unique_ptr<experts::CheckpointStore> store =
        experts::CheckpointStore::create(model, held).value();
    std::unique_ptr<ExpertCache> cache;
    experts::Executor executor;
    experts::PickGroups groups;
    std::vector<float> rows;
    std::vector<std::int64_t> sums;
    std::vector<msg::Pick> picks;
    std::vector<std::uint32_t> hint;

    ExpertServer(std::size_t n_slots, const char* policy)
        : cache(make_cache(n_slots, policy)),
          executor(model.config, kernels::kernels(), *cache),
          groups({model.config.moe.n_experts, model.config.moe.top_k, kCallRows}, held, "experts"),
          rows(kCallRows * model.config.moe.latent_size, 0.25F),
          sums(rows.size()) {}

    std::unique_ptr<ExpertCache> make_cache(std::size_t n_slots, const char* policy) const {
        ExpertCache::Options options;
        options.budget_bytes = n_slots * store->slot_bytes();
        options.n_layers = model.config.n_layers;
        options.n_experts = model.config.moe.n_experts;
        options.n_held = held.count();
        options.top_k = model.config.moe.top_k;
        options.policy = policy;
        return ExpertCache::create(options, *store).value();
    }

    /// A hint and a call about other experts in each `round`.
    bool call(std::uint32_t layer, std::uint32_t n_rows, std::uint32_t round) {
        const model::MoeConfig& moe = model.config.moe;
        picks.clear();
        hint.clear();
        for (std::uint32_t row = 0; row < n_rows; ++row)
            for (std::uint32_t rank = 0; rank < moe.top_k; ++rank) {
                const std::uint32_t expert = (round * 5 + row * 3 + rank * 7) % moe.n_experts;
                picks.push_back({row, expert, 0.3F, rank});
                hint.push_back(expert);
            }
        cache->prefetch(layer, hint);
        const std::size_t n_values = std::size_t{n_rows} * moe.latent_size;
        experts::Executor::Times times;
        return groups.group(layer, n_rows, picks).has_value() &&
               executor
                   .run(layer, std::span(rows).first(n_values), picks, groups,
                        Deadline::after_ms(20'000), std::span(sums).first(n_values), times)
                   .has_value();
    }

    /// A token: a call for every layer that has experts.
    bool token(std::uint32_t n_rows, std::uint32_t round) {
        bool all_well = true;
        for (std::uint32_t layer = model.config.first_k_dense; layer < model.config.n_layers;
             ++layer)
            all_well = call(layer, n_rows, round) && all_well;
        return all_well;
    }
};

/// What 24 tokens take after as many others: every expert was used by then.
std::size_t count_tokens(ExpertServer& server, std::uint32_t n_rows) {
    bool all_well = true;
    std::uint32_t round = 0;
    for (; round < 24; ++round) all_well = server.token(n_rows, round) && all_well;
    const std::size_t before = n_allocations();
    for (; round < 48; ++round) all_well = server.token(n_rows, round) && all_well;
    const std::size_t n = n_allocations() - before;
    CHECK(all_well);
    return n;
}

}  // namespace

TEST_CASE("a call of experts that are in memory allocates nothing") {
    for (int n_threads : {1, 2}) {
        CAPTURE(n_threads);
        kernels::set_threads(n_threads);
        ExpertServer server(10'000, "rank-weighted");
        CHECK(count_tokens(server, 1) == 0);
        CHECK(count_tokens(server, kCallRows) == 0);
    }
    kernels::set_threads(0);
}

TEST_CASE("a call that reads and evicts allocates nothing") {
    for (const char* policy : {"rank-weighted", "lru"}) {
        CAPTURE(policy);
        ExpertServer server(40, policy);
        CHECK(count_tokens(server, 1) == 0);
        CHECK(count_tokens(server, kCallRows) == 0);
        CHECK(server.cache->counts().evictions > 100);
    }
}

}  // namespace k3::test
