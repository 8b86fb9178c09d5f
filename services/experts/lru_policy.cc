#include "services/experts/lru_policy.h"

namespace k3::experts {

LruPolicy::LruPolicy(const Shape& shape)
    : shape_(shape),
      links_(std::size_t{shape.n_layers} * shape.n_experts + 1),
      head_(static_cast<std::uint32_t>(links_.size() - 1)) {
    links_[head_] = {head_, head_, false};
}

void LruPolicy::unlink(std::uint32_t index) noexcept {
    Link& link = links_[index];
    links_[link.previous].next = link.next;
    links_[link.next].previous = link.previous;
    link.kept = false;
    --size_;
}

void LruPolicy::link_first(std::uint32_t index) noexcept {
    const std::uint32_t second = links_[head_].next;
    links_[index] = {head_, second, true};
    links_[second].previous = index;
    links_[head_].next = index;
    ++size_;
}

void LruPolicy::visit(std::uint32_t layer, std::span<const ExpertUse> uses) noexcept {
    for (const ExpertUse& use : uses) {
        const std::uint32_t index = at({layer, use.expert});
        if (!links_[index].kept) continue;
        unlink(index);
        link_first(index);
    }
}

EvictionPolicy::Admission LruPolicy::admit(ExpertKey key) noexcept {
    if (shape_.capacity == 0) return {};
    Admission admission{.admitted = true};
    if (size_ == shape_.capacity) {
        const std::uint32_t oldest = links_[head_].previous;
        admission.evicts = true;
        admission.evicted = {oldest / shape_.n_experts, oldest % shape_.n_experts};
        unlink(oldest);
    }
    link_first(at(key));
    return admission;
}

void LruPolicy::drop(ExpertKey key) noexcept { unlink(at(key)); }

}  // namespace k3::experts
