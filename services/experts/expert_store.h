#pragma once
// Where an expert's bytes come from when they are not in RAM.
//
// The interface is the tier below the cache. Today there is one origin, the checkpoint as released;
// a pack that holds one server's share, and a disk cache in front of a slow origin, are further
// kinds of the same thing.

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "common/base/result.h"
#include "common/model/load.h"
#include "common/model/placement.h"
#include "services/experts/expert_record.h"

namespace k3::experts {

struct ExpertKey {
    std::uint32_t layer = 0;  // zero-based, of the whole model
    std::uint32_t expert = 0;
    bool operator==(const ExpertKey&) const = default;
};

class ExpertStore {
  public:
    virtual ~ExpertStore() = default;

    /// Bytes of every expert's record.
    virtual std::uint64_t record_bytes() const noexcept = 0;

    /// Fills `record` (record_bytes() long) with the expert's weights, laid out as
    /// docs/formats/expert_record.md says, and makes sure that fp32 can hold each of them: whoever
    /// uses them later need not look again. Any thread, several at a time.
    /// Errors: corrupt (naming layer, expert, tensor, row, group, file and offset; or the file that
    /// ends early), io, not_found (an expert that this store does not have). `record` holds
    /// anything then.
    virtual Status read(ExpertKey key, std::span<std::byte> record) = 0;
};

/// Reads straight from the shards of a checkpoint.
class CheckpointStore final : public ExpertStore {
  public:
    /// Looks up the tensors of the experts in `held` and of no others.
    /// Errors: not_found, incompatible (tensors that are absent or have another type or shape: the
    /// first three names and their number).
    static Result<std::unique_ptr<CheckpointStore>> create(const model::Model& model,
                                                           const model::Placement& held);

    std::uint64_t record_bytes() const noexcept override { return record_.bytes(); }
    Status read(ExpertKey key, std::span<std::byte> record) override;

    const ExpertRecord& record() const noexcept { return record_; }
    /// Read from files since the start, and in how many system calls' worth of runs.
    std::uint64_t bytes_read() const noexcept { return bytes_read_.load(); }
    std::uint64_t runs_read() const noexcept { return runs_read_.load(); }

  private:
    /// Where one tensor lies. Kept for every held expert (96 bytes each) because a look-up by name
    /// would build six strings for every read.
    struct Place {
        std::uint64_t offset = 0;
        std::uint32_t shard = 0;
        std::uint32_t part = 0;
    };
    using Places = std::array<Place, ExpertRecord::kParts>;  // in the order of the files

    CheckpointStore(const model::Model& model, const model::Placement& held);
    Status look_up(const model::Placement& held);
    const Places* places_of(ExpertKey key) const noexcept;
    Status read_parts(const Places& places, std::span<std::byte> record);
    Error bad_group(ExpertKey key, const ExpertRecord::BadGroup& bad) const;

    std::shared_ptr<const storage::Checkpoint> checkpoint_;
    model::ModelConfig config_;
    ExpertRecord record_;
    std::vector<std::uint32_t> index_;  // [n_layers * n_experts], into places_, or kNone
    std::vector<Places> places_;
    std::atomic<std::uint64_t> bytes_read_{0};
    std::atomic<std::uint64_t> runs_read_{0};
};

}  // namespace k3::experts
