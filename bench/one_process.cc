#include "bench/one_process.h"

#include <algorithm>
#include <span>
#include <utility>
#include <vector>

#include "bench/machine.h"
#include "common/kernels/parallel.h"
#include "common/model/load.h"
#include "common/model/placement.h"
#include "services/experts/executor.h"
#include "services/experts/expert_cache.h"
#include "services/experts/expert_store.h"
#include "services/experts/pick_groups.h"
#include "services/trunk/ram_weights.h"
#include "services/trunk/session.h"
#include "services/trunk/stage.h"

namespace k3::bench {

namespace {

constexpr std::int64_t kReadMs = 600'000;
constexpr std::uint64_t kSessionBytes = std::uint64_t{1} << 34U;  // a ceiling, not taken

/// An expert server's work behind the trunk's interface.
class CalledExperts final : public trunk::ExpertBackend {
  public:
    static Result<std::unique_ptr<CalledExperts>> create(const model::Model& model,
                                                         std::uint64_t cache_bytes,
                                                         std::uint32_t max_rows) {
        std::unique_ptr<CalledExperts> out(new CalledExperts);
        const model::ModelConfig& config = model.config;
        ASSIGN_OR_RETURN(out->held_, model::parse_share("all", config));
        ASSIGN_OR_RETURN(out->store_, experts::CheckpointStore::create(model, out->held_));
        experts::ExpertCache::Options cache;
        cache.budget_bytes = cache_bytes;
        cache.n_layers = config.n_layers;
        cache.n_experts = config.moe.n_experts;
        cache.n_held = out->held_.count();
        cache.top_k = config.moe.top_k;
        ASSIGN_OR_RETURN(out->cache_, experts::ExpertCache::create(cache, *out->store_));
        out->executor_ =
            std::make_unique<experts::Executor>(config, kernels::kernels(), *out->cache_);
        out->groups_ = std::make_unique<experts::PickGroups>(
            experts::PickGroups::Limits{config.moe.n_experts, config.moe.top_k, max_rows},
            out->held_, "experts");
        return out;
    }

    void prefetch(const trunk::Routing&) noexcept override {}

    Status start(const trunk::Routing& routing, std::span<const float> latent) override {
        layer_ = routing.layer;
        latent_ = latent;
        picks_.clear();
        for (std::size_t i = 0; i < routing.n_rows * routing.top_k; ++i)
            picks_.push_back({static_cast<std::uint32_t>(i / routing.top_k), routing.ids[i],
                              routing.weights[i], static_cast<std::uint32_t>(i % routing.top_k)});
        return groups_->group(layer_, routing.n_rows, picks_);
    }

    Status finish(std::span<std::int64_t> sums) override {
        experts::Executor::Times times;
        return executor_->run(layer_, latent_, picks_, *groups_, Deadline::after_ms(kReadMs), sums,
                              times);
    }

  private:
    CalledExperts() = default;

    model::Placement held_;
    std::unique_ptr<experts::CheckpointStore> store_;
    std::unique_ptr<experts::ExpertCache> cache_;
    std::unique_ptr<experts::Executor> executor_;
    std::unique_ptr<experts::PickGroups> groups_;
    std::uint32_t layer_ = 0;
    std::span<const float> latent_;
    std::vector<msg::Pick> picks_;
};

}  // namespace

std::vector<std::uint32_t> bench_prompt(std::size_t n) {
    std::vector<std::uint32_t> ids(n);
    for (std::size_t i = 0; i < n; ++i) ids[i] = static_cast<std::uint32_t>(i * 37 + 11) % 256;
    return ids;
}

struct OneProcess::Parts {
    model::Model model;
    std::unique_ptr<trunk::RamWeights> weights;
    std::unique_ptr<CalledExperts> experts;
    std::unique_ptr<trunk::Stage> stage;
    std::unique_ptr<trunk::SessionTable> sessions;
};

OneProcess::OneProcess(std::unique_ptr<Parts> parts) : parts_(std::move(parts)) {}
OneProcess::~OneProcess() = default;

Result<std::unique_ptr<OneProcess>> OneProcess::create(const std::filesystem::path& model,
                                                       std::uint64_t expert_cache_bytes,
                                                       int n_threads, std::size_t max_step_rows) {
    kernels::set_threads(n_threads);
    auto parts = std::make_unique<Parts>();
    ASSIGN_OR_RETURN(parts->model, model::open_model(model));
    const model::ModelConfig& config = parts->model.config;
    const trunk::LayerRange range{0, config.n_layers};
    ASSIGN_OR_RETURN(parts->weights,
                     trunk::RamWeights::load(*parts->model.checkpoint, config, range, nullptr));
    ASSIGN_OR_RETURN(parts->experts,
                     CalledExperts::create(parts->model, expert_cache_bytes,
                                           static_cast<std::uint32_t>(max_step_rows)));
    ASSIGN_OR_RETURN(parts->stage,
                     trunk::Stage::create(config, *parts->weights, *parts->experts,
                                          kernels::kernels(), {range, max_step_rows, n_threads}));
    parts->sessions = std::make_unique<trunk::SessionTable>(
        config, range, n_threads,
        trunk::SessionTable::Options{1, kSessionBytes, config.max_positions});
    return std::unique_ptr<OneProcess>(new OneProcess(std::move(parts)));
}

Result<double> OneProcess::generate(std::size_t n_prompt, std::size_t n_tokens) {
    ASSIGN_OR_RETURN(trunk::Session * session, parts_->sessions->open(1, n_prompt + n_tokens));
    const std::vector<std::uint32_t> prompt = bench_prompt(n_prompt);
    std::vector<trunk::StepRow> rows;
    const double start = now();
    for (std::size_t done = 0; done + 1 < n_prompt + n_tokens; done += rows.size()) {
        const bool prefill = done < n_prompt;
        const std::size_t count =
            prefill ? std::min(parts_->stage->max_step_rows(), n_prompt - done) : 1;
        rows.clear();
        for (std::size_t i = 0; i < count; ++i)
            rows.push_back({session, done + i, prompt[(done + i) % n_prompt]});
        const auto last = static_cast<std::uint32_t>(count - 1);
        const bool wanted = done + count >= n_prompt;
        ASSIGN_OR_RETURN(
            std::ignore,
            parts_->stage->step({rows, {}, std::span(&last, wanted ? std::size_t{1} : 0)}));
    }
    const double seconds = now() - start;
    parts_->sessions->drop(1);
    return seconds;
}

}  // namespace k3::bench
