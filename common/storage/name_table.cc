#include "common/storage/name_table.h"

#include <xxhash.h>

#include <bit>

namespace k3::storage {

namespace {

std::uint64_t hash_of(std::string_view name) noexcept {
    return XXH3_64bits(name.data(), name.size());
}

}  // namespace

std::uint32_t NameTable::build(std::span<const TensorInfo> tensors) {
    tensors_ = tensors;
    slots_.assign(std::bit_ceil(tensors.size() * 2 + 1), Slot{});
    std::size_t mask = slots_.size() - 1;
    for (std::uint32_t index = 0; index < tensors.size(); ++index) {
        std::uint64_t hash = hash_of(tensors[index].name);
        auto tag = static_cast<std::uint32_t>(hash >> 32);
        std::size_t at = hash & mask;
        for (; slots_[at].index != kNone; at = (at + 1) & mask)
            if (slots_[at].tag == tag && tensors[slots_[at].index].name == tensors[index].name)
                return index;
        slots_[at] = {tag, index};
    }
    return kNone;
}

std::uint32_t NameTable::find(std::string_view name) const noexcept {
    std::size_t mask = slots_.size() - 1;
    std::uint64_t hash = hash_of(name);
    auto tag = static_cast<std::uint32_t>(hash >> 32);
    for (std::size_t at = hash & mask; slots_[at].index != kNone; at = (at + 1) & mask)
        if (slots_[at].tag == tag && tensors_[slots_[at].index].name == name)
            return slots_[at].index;
    return kNone;
}

}  // namespace k3::storage
