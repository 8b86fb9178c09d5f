#include "services/trunk/weight_ring.h"

#include "common/base/check.h"

namespace k3::trunk {

WeightRing::WeightRing(storage::ReadPool& pool, std::span<std::byte> memory, std::size_t max_pieces)
    : pool_(pool),
      memory_(memory),
      max_pieces_(max_pieces),
      slots_(std::make_unique<Slot[]>(max_pieces)) {}

std::size_t WeightRing::place(std::size_t bytes) const noexcept {
    if (n_ == 0) return bytes <= memory_.size() ? 0 : memory_.size();
    const std::size_t oldest = slots_[first_].begin;
    if (end_ > oldest) {  // free: behind the newest, and before the oldest
        if (bytes <= memory_.size() - end_) return end_;
        return bytes <= oldest ? 0 : memory_.size();
    }
    return bytes <= oldest - end_ ? end_ : memory_.size();
}

bool WeightRing::try_push(std::uint32_t piece, const storage::ReadRange& range) {
    const std::size_t bytes = range.units_bytes();
    const std::size_t begin = place(bytes);
    if (n_ == max_pieces_ || begin == memory_.size()) return false;
    Slot& slot = slots_[(first_ + n_) % max_pieces_];
    slot.piece = piece;
    slot.range = range;
    slot.begin = begin;
    pool_.start(slot.read, *range.source, range.first_unit(), memory_.subspan(begin, bytes));
    end_ = begin + bytes;
    ++n_;
    return true;
}

Result<std::span<const std::byte>> WeightRing::wait_front(const std::function<bool()>& stopping) {
    K3_CHECK(n_ > 0, "there is a piece");
    Slot& slot = slots_[first_];
    RETURN_IF_ERROR(pool_.wait(slot.read, stopping));
    return std::span<const std::byte>(
        memory_.subspan(slot.begin + slot.range.skipped(), slot.range.bytes));
}

void WeightRing::pop_front() noexcept {
    first_ = (first_ + 1) % max_pieces_;
    --n_;
}

void WeightRing::clear() {
    // The newest first: otherwise the threads would begin reads that are about to be dropped.
    for (; n_ > 0; --n_) pool_.cancel(slots_[(first_ + n_ - 1) % max_pieces_].read);
}

}  // namespace k3::trunk
