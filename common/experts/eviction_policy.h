#pragma once
// Which experts stay in RAM.
//
// A policy keeps a set of at most `capacity` experts and is told every visit of a layer. It knows
// nothing of slots, reads or leases (expert_cache.h), so a recorded routing trace can be replayed
// through it alone (bench/cache).
//
// Threads: one at a time.

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string_view>
#include <vector>

#include "common/base/result.h"
#include "common/experts/expert_key.h"

namespace k3::experts {

class EvictionPolicy {
  public:
    struct Shape {
        std::uint32_t n_layers = 0;
        std::uint32_t n_experts = 0;  // of a layer
        std::size_t capacity = 0;     // experts kept at the same time; may be 0
    };
    /// What became of an expert that was not kept.
    struct Admission {
        bool admitted = false;
        bool evicts = false;
        ExpertKey evicted{};  // if evicts
    };

    virtual ~EvictionPolicy() = default;
    /// As --policy spells it.
    virtual std::string_view name() const noexcept = 0;

    virtual bool keeps(ExpertKey key) const noexcept = 0;
    virtual std::size_t size() const noexcept = 0;  // experts kept now

    /// A call visits `layer` and uses these experts, each once, in order of rank. Comes before
    /// admit() for those of them that are not kept.
    virtual void visit(std::uint32_t layer, std::span<const ExpertUse> uses) noexcept = 0;

    /// `key` is used by the current visit, not kept, and about to be read: keep it from now on?
    /// What is evicted for it may be an expert of the same visit.
    virtual Admission admit(ExpertKey key) noexcept = 0;

    /// `key`, which is kept, could not be read: forget it.
    virtual void drop(ExpertKey key) noexcept = 0;

    /// What is kept now, in any order.
    virtual std::vector<KeptExpert> kept() const = 0;

    /// Keeps an expert of an earlier kept(), as if its layer had just been visited, if there is
    /// room. Given in order of value, most valuable first. Returns whether it is kept now.
    virtual bool restore(const KeptExpert& expert) noexcept = 0;
};

/// "lru" or "rank-weighted". All memory is taken here.
/// Error: invalid_argument (another name).
Result<std::unique_ptr<EvictionPolicy>> make_policy(std::string_view name,
                                                    const EvictionPolicy::Shape& shape);

}  // namespace k3::experts
