#pragma once
// Memory that direct reads can fill: it begins on a block and has whole blocks.

#include <cstddef>
#include <cstdlib>
#include <memory>
#include <new>
#include <span>

#include "common/storage/direct_file.h"

namespace k3::storage {

/// Uninitialised. Move-only.
class BlockMemory {
  public:
    BlockMemory() = default;
    /// At least `bytes`, rounded up to whole blocks. Throws std::bad_alloc: whoever takes much asks
    /// for the free memory first.
    explicit BlockMemory(std::size_t bytes)
        : data_(static_cast<std::byte*>(std::aligned_alloc(kBlockBytes, block_ceiling(bytes)))),
          size_(block_ceiling(bytes)) {
        if (data_ == nullptr && size_ > 0) throw std::bad_alloc();
    }

    std::byte* data() const noexcept { return data_.get(); }
    std::size_t size() const noexcept { return size_; }
    std::span<std::byte> span() const noexcept { return {data_.get(), size_}; }

  private:
    struct Free {
        void operator()(std::byte* memory) const noexcept { std::free(memory); }
    };
    std::unique_ptr<std::byte, Free> data_;
    std::size_t size_ = 0;
};

}  // namespace k3::storage
