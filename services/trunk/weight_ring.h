#pragma once
// Memory for pieces that are read ahead and used once, in the order in which they were asked for.
//
// Pieces have any size. They lie one behind the other; one that does not fit before the end begins
// at the start again, so each is contiguous. Room comes back in the same order, with pop_front().

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>

#include "common/base/result.h"
#include "common/storage/read_pool.h"
#include "common/storage/read_source.h"

namespace k3::trunk {

/// One thread uses it.
class WeightRing {
  public:
    /// Borrows both. `memory` begins at a block; at most `max_pieces` are in the ring.
    WeightRing(storage::ReadPool& pool, std::span<std::byte> memory, std::size_t max_pieces);
    /// As clear().
    ~WeightRing() { clear(); }
    WeightRing(const WeightRing&) = delete;
    WeightRing& operator=(const WeightRing&) = delete;

    /// Starts reading a piece behind the others; false if there is no room for it now.
    bool try_push(std::uint32_t piece, const storage::ReadRange& range);

    bool is_empty() const noexcept { return n_ == 0; }
    /// The oldest piece.
    std::uint32_t front() const noexcept { return slots_[first_].piece; }
    /// Its bytes, once they are there; they stay until pop_front(). After an error nothing but
    /// clear() may follow. Errors: those of ReadPool::wait.
    Result<std::span<const std::byte>> wait_front(const std::function<bool()>& stopping);
    void pop_front() noexcept;
    /// Gives up all pieces; waits for requests under way.
    void clear();

  private:
    struct Slot {
        std::uint32_t piece = 0;
        storage::ReadRange range;
        std::size_t begin = 0;  // of its units in the memory
        storage::PoolRead read;
    };
    /// Where `bytes` fit behind the newest piece, or memory_.size().
    std::size_t place(std::size_t bytes) const noexcept;

    storage::ReadPool& pool_;
    const std::span<std::byte> memory_;
    const std::size_t max_pieces_;
    const std::unique_ptr<Slot[]> slots_;  // circular; reads must not move
    std::size_t first_ = 0;
    std::size_t n_ = 0;
    std::size_t end_ = 0;  // behind the newest piece
};

}  // namespace k3::trunk
