#pragma once
// Memory of one's own in whole pages, huge ones where the system has them: what direct reads are
// read into.

#include <cstddef>
#include <span>
#include <utility>

#include "common/base/result.h"

namespace k3 {

class MemoryBlock {
  public:
    MemoryBlock() = default;
    MemoryBlock(MemoryBlock&& other) noexcept : memory_(std::exchange(other.memory_, {})) {}
    MemoryBlock& operator=(MemoryBlock&& other) noexcept {
        std::swap(memory_, other.memory_);
        return *this;
    }
    MemoryBlock(const MemoryBlock&) = delete;
    MemoryBlock& operator=(const MemoryBlock&) = delete;
    ~MemoryBlock();

    /// Zeroed, begins at a page, and takes memory only as it is touched. `bytes` may be 0.
    /// Error: resource_exhausted naming `what` and the bytes.
    static Result<MemoryBlock> create(std::size_t bytes, const char* what);

    std::byte* data() noexcept { return memory_.data(); }
    const std::byte* data() const noexcept { return memory_.data(); }
    std::size_t size() const noexcept { return memory_.size(); }
    std::span<std::byte> span() noexcept { return memory_; }
    std::span<const std::byte> span() const noexcept { return memory_; }

  private:
    std::span<std::byte> memory_;
};

}  // namespace k3
