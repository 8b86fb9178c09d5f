#pragma once
// Private to common/storage: finds a tensor by name with one probe.
//
// Open addressing over 8-byte slots, at most half full: 8 MB for the released checkpoint, where a
// std::unordered_map would take about 60. The tag (half of the hash) keeps a probe from touching
// the names of others.

#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

#include "common/storage/safetensors.h"

namespace k3::storage {

class NameTable {
  public:
    static constexpr std::uint32_t kNone = 0xFFFFFFFFU;

    /// Takes the names of `tensors`, which must not be moved or renamed afterwards.
    /// Returns the index of a tensor whose name another one has too, or kNone.
    std::uint32_t build(std::span<const TensorInfo> tensors);

    /// Index into the tensors given to build(), or kNone.
    std::uint32_t find(std::string_view name) const noexcept;

  private:
    struct Slot {
        std::uint32_t tag = 0;
        std::uint32_t index = kNone;
    };
    std::span<const TensorInfo> tensors_;
    std::vector<Slot> slots_ = std::vector<Slot>(1);  // a power of two
};

}  // namespace k3::storage
