#pragma once
// One entry of a pack as something to read from: its content, in pieces that are verified.

#include <cstdint>
#include <span>

#include "common/base/result.h"
#include "common/pack/pack.h"
#include "common/storage/read_source.h"

namespace k3::pack {

class EntrySource final : public storage::ReadSource {
  public:
    /// Borrows both.
    EntrySource(const Pack& pack, const Entry& entry) noexcept : pack_(&pack), entry_(&entry) {}

    std::uint64_t unit_bytes() const noexcept override { return entry_->piece_bytes; }
    std::uint64_t end() const noexcept override { return entry_->stored_bytes(); }
    /// Errors: those of Pack::read.
    Status read(std::uint64_t offset, std::span<std::byte> dst) const override {
        return pack_->read(*entry_, Pack::pieces_of(*entry_, offset, dst.size()), dst);
    }

  private:
    const Pack* pack_;
    const Entry* entry_;
};

}  // namespace k3::pack
