#pragma once
// The files that together hold the runs of a trunk: one pack, or the parts of a striped one.
//
// A step uses one matrix after the other, so files that held whole layers would keep one device
// busy at a time: what is read ahead is a fraction of a layer. Parts therefore take turns every 4
// MiB of a run, and every read of a few matrices' rows meets all devices.

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "common/base/result.h"
#include "common/pack/pack.h"
#include "common/pack/trunk_run.h"
#include "common/storage/read_source.h"

namespace k3::pack {

class TrunkPacks {
  public:
    /// In any order. Errors: those of Pack::open; those of of().
    static Result<TrunkPacks> open(std::span<const std::filesystem::path> files,
                                   Pack::Mode mode = Pack::Mode::direct_if_possible);
    /// At least one. Errors: not_found (a part is missing: which), invalid_argument (a part twice),
    /// incompatible (not a trunk pack, parts of different numbers or checkpoints), all naming
    /// files.
    static Result<TrunkPacks> of(std::vector<std::shared_ptr<const Pack>> parts);

    std::uint32_t n_parts() const noexcept { return static_cast<std::uint32_t>(parts_.size()); }
    const Pack& part(std::uint32_t index) const noexcept { return *parts_[index]; }
    /// For people: the file, or the first of several.
    std::string name() const;
    /// Of the first part that is not read directly; empty if all are.
    std::string why_buffered() const;

  private:
    std::vector<std::shared_ptr<const Pack>> parts_;  // by index; also held by whoever opened them
};

/// A run of them as something to read from: pieces that are verified, one lane for each part.
class RunSource final : public storage::ReadSource {
  public:
    /// Borrows `packs`, which hold the run (check_runs).
    RunSource(const TrunkPacks& packs, const TrunkRun& run);

    storage::Lanes lanes() const noexcept override { return {packs_->n_parts(), stripe_bytes_}; }
    std::uint64_t unit_bytes() const noexcept override { return unit_bytes_; }
    std::uint64_t end() const noexcept override { return end_; }
    /// Errors: those of Pack::read.
    Status read(std::uint64_t offset, std::span<std::byte> dst) const override;

  private:
    const TrunkPacks* packs_;
    EntryKey key_;
    std::uint64_t unit_bytes_;
    std::uint64_t stripe_bytes_;
    std::uint64_t end_;
};

}  // namespace k3::pack
