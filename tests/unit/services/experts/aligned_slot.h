#pragma once
// Memory as the cache's slots are: beginning on a block, with room for what a store reads.

#include <cstddef>
#include <span>

#include "common/base/memory_block.h"
#include "services/experts/expert_store.h"

namespace k3::test {

class AlignedSlot {
  public:
    explicit AlignedSlot(const experts::ExpertStore& store)
        : memory_(MemoryBlock::create(store.slot_bytes(), "a test").value()) {}
    std::span<std::byte> span() { return memory_.span(); }

  private:
    MemoryBlock memory_;
};

}  // namespace k3::test
