#pragma once
// Experts from a pack that `k3pipe pack experts` made: one direct read and one checksum each.

#include <atomic>
#include <cstdint>
#include <memory>
#include <span>
#include <utility>

#include "common/base/result.h"
#include "common/model/load.h"
#include "common/model/placement.h"
#include "common/pack/expert_record.h"
#include "common/pack/pack.h"
#include "services/experts/expert_store.h"

namespace k3::experts {

class PackStore final : public ExpertStore {
  public:
    /// `pack` belongs to the model (pack::open_packed_model).
    /// Errors: those of pack::check_records.
    static Result<std::unique_ptr<PackStore>> create(std::shared_ptr<const pack::Pack> pack,
                                                     const model::Model& model,
                                                     const model::Placement& held);

    std::uint64_t record_bytes() const noexcept override { return record_.bytes(); }
    /// A record begins on a block of the pack, and so at the beginning of the slot.
    Result<std::span<const std::byte>> read(ExpertKey key, std::span<std::byte> slot) override;
    StoreCounts counts() const noexcept override;

  private:
    PackStore(std::shared_ptr<const pack::Pack> pack, const model::ModelConfig& config)
        : pack_(std::move(pack)), config_(config), record_(config) {}

    std::shared_ptr<const pack::Pack> pack_;  // also held by whoever opened it
    model::ModelConfig config_;
    ExpertRecord record_;
    std::atomic<std::uint64_t> n_reads_{0};
};

}  // namespace k3::experts
