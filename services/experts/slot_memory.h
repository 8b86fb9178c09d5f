#pragma once
// The memory of the slots: one block, in huge pages where the system has them.
//
// Nothing here touches it. The cache's reader threads do, and they keep to the cores of the process
// (common/base/cores.h): so a slot lies on the NUMA node where it will be computed with.

#include <cstddef>
#include <cstdint>
#include <span>
#include <utility>

#include "common/base/memory_block.h"
#include "common/base/result.h"

namespace k3::experts {

class SlotMemory {
  public:
    /// Error: resource_exhausted, naming the bytes.
    static Result<SlotMemory> map(std::size_t n_slots, std::uint64_t slot_bytes) {
        ASSIGN_OR_RETURN(MemoryBlock memory,
                         MemoryBlock::create(n_slots * slot_bytes, "the experts' cache"));
        return SlotMemory(std::move(memory), slot_bytes);
    }

    /// [slot_bytes], beginning on a page.
    std::span<std::byte> slot(std::size_t index) noexcept {
        return memory_.span().subspan(index * slot_bytes_, slot_bytes_);
    }
    std::span<const std::byte> slot(std::size_t index) const noexcept {
        return memory_.span().subspan(index * slot_bytes_, slot_bytes_);
    }

  private:
    SlotMemory(MemoryBlock memory, std::size_t slot_bytes) noexcept
        : memory_(std::move(memory)), slot_bytes_(slot_bytes) {}

    MemoryBlock memory_;
    std::size_t slot_bytes_;
};

}  // namespace k3::experts
