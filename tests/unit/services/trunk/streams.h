#pragma once
// A trunk in the test process whose weights are streamed, from a checkpoint or a pack.

#include <doctest/doctest.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "common/pack/trunk_packs.h"
#include "common/pack/trunk_run.h"
#include "services/trunk/streamed_weights.h"
#include "tests/unit/services/trunk/harness.h"

namespace k3::test {

/// How weights are streamed, and what became of it.
struct Stream {
    std::uint64_t budget = 0;  // 0: the smallest
    std::uint64_t piece_bytes = 4096;
    storage::DirectFile::Mode mode = storage::DirectFile::Mode::direct_if_possible;
    storage::ReadShape shape{8192, 2};
    std::function<bool()> stopping = [] { return false; };
    std::function<Status(const storage::ReadSource&, std::uint64_t, std::size_t)> before_request;
    std::optional<pack::TrunkPacks> packs = {};  // none: from the checkpoint
    telemetry::Counters counters = {};

    std::uint64_t counter(const std::string& name) {
        for (const msg::Counter& counter : counters.snapshot())
            if (counter.name == name) return counter.value;
        FAIL("no counter " << name);
        return 0;
    }
};

/// `budget` 0: the smallest.
inline model::WeightPlan plan_of(const model::ModelConfig& config, trunk::LayerRange range,
                                 std::uint64_t budget, std::uint64_t piece_bytes) {
    const std::uint64_t all = std::uint64_t{1} << 40;
    const std::uint64_t smallest =
        model::plan_weights(config, {range.first, range.count, all, piece_bytes})
            .value()
            .smallest_bytes;
    return model::plan_weights(
               config, {range.first, range.count, budget > 0 ? budget : smallest, piece_bytes})
        .value();
}

inline Result<std::unique_ptr<trunk::WeightFiles>> open_files(const model::Model& model,
                                                              trunk::LayerRange range,
                                                              const Stream& stream) {
    if (stream.packs.has_value()) return trunk::PackFiles::open(*stream.packs, model.config, range);
    return trunk::CheckpointFiles::open(*model.checkpoint, model.config, range, stream.mode);
}

inline Result<std::unique_ptr<trunk::StreamedWeights>> load(const model::Model& model,
                                                            trunk::LayerRange range,
                                                            Stream& stream) {
    trunk::StreamedWeights::Options options;
    options.plan = plan_of(model.config, range, stream.budget, stream.piece_bytes);
    options.shape = stream.shape;
    options.stopping = stream.stopping;
    options.before_request = stream.before_request;
    ASSIGN_OR_RETURN(auto files, open_files(model, range, stream));
    return trunk::StreamedWeights::load(std::move(files), model.config, range, std::move(options),
                                        stream.counters, nullptr);
}

inline Harness::Options harness_options(const model::Model& model, Stream& stream,
                                        int n_threads = 2) {
    Harness::Options options;
    options.n_threads = n_threads;
    options.weights = [&](trunk::LayerRange range) -> std::unique_ptr<trunk::WeightSource> {
        auto weights = load(model, range, stream);
        REQUIRE(weights.has_value());
        return std::move(weights).value();
    };
    return options;
}

/// Prefill in pieces, some without logits, two sessions mixed, then decode of both.
inline std::vector<float> conversation(Harness& trunk) {
    std::vector<float> all;
    const auto add = [&](const std::vector<TokenRow>& rows,
                         const std::vector<std::uint32_t>& want) {
        const auto logits = trunk.step(rows, want);
        REQUIRE(logits.has_value());
        all.insert(all.end(), logits->begin(), logits->end());
    };
    trunk.open(1);
    trunk.open(2);
    add({{1, 5}, {1, 6}, {1, 7}}, {});
    add({{1, 8}, {2, 30}, {2, 31}}, {0});
    add({{2, 32}}, {});
    add({{2, 5}, {1, 9}}, {0, 1});
    for (std::uint32_t i = 0; i < 3; ++i) add({{1, 10 + i}, {2, 40 + i}}, {0, 1});
    std::vector<TokenRow> many;  // more rows than the embedding reads at once
    for (std::uint32_t i = 0; i < 40; ++i) many.push_back({1, 3 * i});
    add(many, {39});
    return all;
}

inline std::vector<float> resident_conversation() {
    Harness trunk(tiny_model());
    return conversation(trunk);
}

inline std::uint64_t all_bytes() {
    const model::ModelConfig& config = tiny_model().config;
    model::WeightPlan plan = plan_of(config, {0, config.n_layers}, std::uint64_t{1} << 40, 4096);
    CHECK(plan.keeps_all());
    return plan.memory_bytes();
}

}  // namespace k3::test
