#pragma once
// The memory of the slots: one private mapping, in huge pages where the system has them.
//
// Nothing here touches it. The cache's reader threads do, and they keep to the cores of the process
// (common/base/cores.h): so a slot lies on the NUMA node where it will be computed with.

#include <cstddef>
#include <cstdint>
#include <span>

#include "common/base/result.h"

namespace k3::experts {

class SlotMemory {
  public:
    /// Error: resource_exhausted, naming the bytes.
    static Result<SlotMemory> map(std::size_t n_slots, std::uint64_t slot_bytes);
    SlotMemory(SlotMemory&& other) noexcept;
    SlotMemory& operator=(SlotMemory&&) = delete;
    SlotMemory(const SlotMemory&) = delete;
    SlotMemory& operator=(const SlotMemory&) = delete;
    ~SlotMemory();

    /// [slot_bytes], beginning on a page.
    std::span<std::byte> slot(std::size_t index) const noexcept {
        return {data_ + index * slot_bytes_, slot_bytes_};
    }

  private:
    SlotMemory(std::byte* data, std::size_t bytes, std::size_t slot_bytes) noexcept
        : data_(data), bytes_(bytes), slot_bytes_(slot_bytes) {}

    std::byte* data_;
    std::size_t bytes_;
    std::size_t slot_bytes_;
};

}  // namespace k3::experts
