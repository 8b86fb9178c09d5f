#include "common/experts/rank_weighted_policy.h"

#include <algorithm>

namespace k3::experts {

namespace {

constexpr double kFirstRank = 0.65;
constexpr double kPerRank = 0.031;
constexpr std::uint32_t kLastRank = 20;  // 0.65 - 0.031 * 21 would be negative
constexpr double kDecay = 0.4;

/// Spread the experts of one layer, and those of one number, over the order of eviction. The same
/// whatever the model's size, so that a trace replays without it.
constexpr std::uint32_t kScatter = 997;
constexpr std::uint32_t kScatterLayers = 896;

}  // namespace

RankWeightedPolicy::RankWeightedPolicy(const Shape& shape)
    : shape_(shape),
      entries_(std::size_t{shape.n_layers} * shape.n_experts),
      kept_(entries_.size()),
      layers_(shape.n_layers) {
    double power = 1;
    for (double& entry : decay_) {
        entry = power;
        power *= kDecay;
    }
}

double RankWeightedPolicy::value(ExpertKey key) const noexcept {
    const Entry& entry = entries_[at(key)];
    const std::uint32_t age = layers_[key.layer].n_visits - entry.visit;
    return age < decay_.size() ? entry.value * decay_[age] : 0;
}

RankWeightedPolicy::Rank RankWeightedPolicy::rank_of(ExpertKey key) const noexcept {
    return {value(key), (key.layer * kScatterLayers + key.expert) % kScatter};
}

void RankWeightedPolicy::visit(std::uint32_t layer, std::span<const ExpertUse> uses) noexcept {
    Layer& visited = layers_[layer];
    ++visited.n_visits;
    visited.changed = true;
    for (const ExpertUse& use : uses) {
        Entry& entry = entries_[at({layer, use.expert})];
        const double fresh = kFirstRank - kPerRank * std::min(use.rank, kLastRank);
        entry.value = std::max(value({layer, use.expert}), fresh);
        entry.visit = visited.n_visits;
    }
}

/// Finds the kept expert of `layer` that would go first. Between two visits its value stands still.
void RankWeightedPolicy::refresh(std::uint32_t layer) noexcept {
    Layer& of = layers_[layer];
    if (!of.changed) return;
    of.changed = false;
    of.least_rank = {};
    for (std::uint32_t i = 0; i < of.n_kept; ++i) {
        const std::uint32_t expert = kept_[at({layer, i})];
        const Rank rank = rank_of({layer, expert});
        if (i > 0 && !(rank < of.least_rank)) continue;
        of.least = expert;
        of.least_rank = rank;
    }
}

void RankWeightedPolicy::keep(ExpertKey key) noexcept {
    Layer& layer = layers_[key.layer];
    entries_[at(key)].place = layer.n_kept;
    kept_[at({key.layer, layer.n_kept++})] = key.expert;
    layer.changed = true;
    ++size_;
}

EvictionPolicy::Admission RankWeightedPolicy::admit(ExpertKey key) noexcept {
    if (size_ < shape_.capacity) {
        keep(key);
        return {.admitted = true};
    }
    std::uint32_t poorest = shape_.n_layers;
    for (std::uint32_t layer = 0; layer < shape_.n_layers; ++layer) {
        if (layers_[layer].n_kept == 0) continue;
        refresh(layer);
        if (poorest == shape_.n_layers || layers_[layer].least_rank < layers_[poorest].least_rank)
            poorest = layer;
    }
    if (poorest == shape_.n_layers || !(value(key) > layers_[poorest].least_rank.value)) return {};
    const ExpertKey evicted{poorest, layers_[poorest].least};
    drop(evicted);
    keep(key);
    return {.admitted = true, .evicts = true, .evicted = evicted};
}

void RankWeightedPolicy::drop(ExpertKey key) noexcept {
    Layer& layer = layers_[key.layer];
    const std::uint32_t place = entries_[at(key)].place;
    const std::uint32_t last = kept_[at({key.layer, --layer.n_kept})];
    kept_[at({key.layer, place})] = last;
    entries_[at({key.layer, last})].place = place;
    entries_[at(key)].place = kNotKept;
    layer.changed = true;
    --size_;
}

std::vector<KeptExpert> RankWeightedPolicy::kept() const {
    std::vector<KeptExpert> out;
    out.reserve(size_);
    for (std::uint32_t layer = 0; layer < shape_.n_layers; ++layer)
        for (std::uint32_t i = 0; i < layers_[layer].n_kept; ++i) {
            const ExpertKey key{layer, kept_[at({layer, i})]};
            out.push_back({key, value(key)});
        }
    return out;
}

bool RankWeightedPolicy::restore(const KeptExpert& expert) noexcept {
    if (keeps(expert.key)) return true;
    if (size_ >= shape_.capacity) return false;
    Entry& entry = entries_[at(expert.key)];
    entry.value = std::max(value(expert.key), expert.value);
    entry.visit = layers_[expert.key.layer].n_visits;
    keep(expert.key);
    return true;
}

}  // namespace k3::experts
