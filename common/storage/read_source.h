#pragma once
// What large reads go to: bytes at offsets, taken in whole units.
//
// A unit is the least that can be read at a time: a block of a file past the page cache, or as many
// blocks of a pack as share a checksum. Whoever wants some bytes takes the units around them.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>

#include "common/base/result.h"

namespace k3::storage {

/// How a source is spread over devices: stripe s lies in lane s % count.
struct Lanes {
    std::uint32_t count = 1;
    std::uint64_t stripe_bytes = 0;  // whole units; means nothing if there is one lane
};

class ReadSource {
  public:
    virtual ~ReadSource() = default;

    virtual Lanes lanes() const noexcept { return {}; }

    /// A multiple of kBlockBytes (direct_file.h).
    virtual std::uint64_t unit_bytes() const noexcept = 0;
    /// Where the last unit ends. It may be shorter than the others, but has whole blocks.
    virtual std::uint64_t end() const noexcept = 0;
    /// Fills dst, which begins at a block in memory, with the units from `offset` on. Any thread,
    /// several at a time. Errors name file and offset: io, corrupt.
    virtual Status read(std::uint64_t offset, std::span<std::byte> dst) const = 0;
};

/// Bytes of a source, and the units around them that a read takes.
struct ReadRange {
    const ReadSource* source = nullptr;
    std::uint64_t offset = 0;
    std::uint64_t bytes = 0;

    std::uint64_t first_unit() const noexcept {
        return offset / source->unit_bytes() * source->unit_bytes();
    }
    std::size_t units_bytes() const noexcept {
        const std::uint64_t unit = source->unit_bytes();
        return std::min((offset + bytes + unit - 1) / unit * unit, source->end()) - first_unit();
    }
    /// Of the first byte in these units.
    std::size_t skipped() const noexcept { return offset - first_unit(); }
};

}  // namespace k3::storage
