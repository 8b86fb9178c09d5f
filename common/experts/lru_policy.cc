#include "common/experts/lru_policy.h"

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

void LruPolicy::link_after(std::uint32_t previous, std::uint32_t index) noexcept {
    const std::uint32_t next = links_[previous].next;
    links_[index] = {previous, next, true};
    links_[next].previous = index;
    links_[previous].next = index;
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
        admission.evicted = key_at(oldest);
        unlink(oldest);
    }
    link_first(at(key));
    return admission;
}

void LruPolicy::drop(ExpertKey key) noexcept { unlink(at(key)); }

std::vector<KeptExpert> LruPolicy::kept() const {
    std::vector<KeptExpert> out;
    out.reserve(size_);
    for (std::uint32_t index = links_[head_].previous; index != head_;
         index = links_[index].previous)
        out.push_back({key_at(index), static_cast<double>(out.size() + 1)});
    return out;
}

bool LruPolicy::restore(const KeptExpert& expert) noexcept {
    if (keeps(expert.key)) return true;
    if (size_ >= shape_.capacity) return false;
    link_after(links_[head_].previous, at(expert.key));  // older than everything that is kept
    return true;
}

}  // namespace k3::experts
