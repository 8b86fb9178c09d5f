#pragma once
// Memory as the cache's slots are: beginning on a block, with room for what a store reads.

#include <cstddef>
#include <cstdlib>
#include <memory>
#include <span>

#include "services/experts/expert_store.h"

namespace k3::test {

class AlignedSlot {
  public:
    explicit AlignedSlot(const experts::ExpertStore& store)
        : bytes_(store.slot_bytes()),
          memory_(static_cast<std::byte*>(std::aligned_alloc(storage::kBlockBytes, bytes_))) {}
    std::span<std::byte> span() const { return {memory_.get(), bytes_}; }

  private:
    struct Free {
        void operator()(std::byte* memory) const { std::free(memory); }
    };
    std::size_t bytes_;
    std::unique_ptr<std::byte, Free> memory_;
};

}  // namespace k3::test
