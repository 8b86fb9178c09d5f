#pragma once
// Least recently used: the policy everyone knows, kept for comparison.
//
// A step visits the layers in order and returns to the first at the next token, so this gives up
// every expert shortly before its next use: on the published trace it retains nothing below one
// token's worth of experts (25.8 GB) and 39.0 % at 64 GB.

#include <vector>

#include "common/experts/eviction_policy.h"

namespace k3::experts {

class LruPolicy final : public EvictionPolicy {
  public:
    explicit LruPolicy(const Shape& shape);

    std::string_view name() const noexcept override { return "lru"; }
    bool keeps(ExpertKey key) const noexcept override { return links_[at(key)].kept; }
    std::size_t size() const noexcept override { return size_; }
    void visit(std::uint32_t layer, std::span<const ExpertUse> uses) noexcept override;
    Admission admit(ExpertKey key) noexcept override;
    void drop(ExpertKey key) noexcept override;
    /// Values count from 1 for what would go first.
    std::vector<KeptExpert> kept() const override;
    bool restore(const KeptExpert& expert) noexcept override;

  private:
    /// A doubly linked list through an array, most recent first; the last entry is its head.
    struct Link {
        std::uint32_t previous = 0;
        std::uint32_t next = 0;
        bool kept = false;
    };
    std::uint32_t at(ExpertKey key) const noexcept {
        return key.layer * shape_.n_experts + key.expert;
    }
    void unlink(std::uint32_t index) noexcept;
    void link_first(std::uint32_t index) noexcept { link_after(head_, index); }
    void link_after(std::uint32_t previous, std::uint32_t index) noexcept;
    ExpertKey key_at(std::uint32_t index) const noexcept {
        return {index / shape_.n_experts, index % shape_.n_experts};
    }

    Shape shape_;
    std::vector<Link> links_;
    std::uint32_t head_ = 0;
    std::size_t size_ = 0;
};

}  // namespace k3::experts
