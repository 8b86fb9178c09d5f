#pragma once
// Where an expert's bytes come from when they are not in RAM.
//
// The interface is the tier below the cache. The checkpoint as released is one kind of it; others
// keep the same records elsewhere, or stand in front of one that is slow.
//
// Who reads past the page cache gets whole blocks of the device, and a record begins anywhere in
// its first one. So a slot has room for the blocks that a record touches, and the record lies in it
// where it lies in them: copying it to the slot's beginning would cost four times the CPU time of
// the read (0.19 instead of 0.04 s for each GiB), and computing gains nothing by it
// (bench/expert_reads measures both).

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "common/base/result.h"
#include "common/experts/expert_key.h"
#include "common/model/load.h"
#include "common/model/memory_plan.h"
#include "common/model/placement.h"
#include "common/pack/expert_record.h"
#include "common/storage/direct_file.h"

namespace k3::experts {

using pack::ExpertRecord;

/// Since the start. Bytes asked of the files are read_bytes + rounding_bytes.
struct StoreCounts {
    std::uint64_t read_bytes = 0;      // of records
    std::uint64_t rounding_bytes = 0;  // read besides, because direct reads take whole blocks
    std::uint64_t runs = 0;            // pieces of files that were read in one go
};

class ExpertStore {
  public:
    virtual ~ExpertStore() = default;

    /// Bytes of every expert's record.
    virtual std::uint64_t record_bytes() const noexcept = 0;

    /// Bytes of the slot that read() wants: the blocks that a record touches wherever it begins.
    std::uint64_t slot_bytes() const noexcept { return model::expert_slot_bytes(record_bytes()); }

    /// Reads the expert's weights into `slot` (slot_bytes() long, beginning on a block) and returns
    /// where in it they lie: [record_bytes()], laid out as docs/formats/expert_record.md says.
    /// Makes sure that fp32 can hold each of them: whoever uses them later need not look again. Any
    /// thread, several at a time.
    /// Errors: corrupt (naming layer, expert, tensor, row, group, file and offset; or the file that
    /// ends early), io, not_found (an expert that this store does not have). `slot` holds anything
    /// then.
    virtual Result<std::span<const std::byte>> read(ExpertKey key, std::span<std::byte> slot) = 0;

    /// A call uses these experts of `layer`, each once, in order of rank, wherever their bytes come
    /// from: for stores that choose what they keep. One thread.
    virtual void visit(std::uint32_t /*layer*/, std::span<const ExpertUse> /*uses*/) noexcept {}

    /// Any thread.
    virtual StoreCounts counts() const noexcept = 0;
};

/// Reads straight from the shards of a checkpoint, past the page cache where that is possible:
/// where the file system has direct reads, and for experts whose six tensors lie in one run and in
/// the record's order, as those of the released files do. Everything else is read through the page
/// cache, part by part.
class CheckpointStore final : public ExpertStore {
  public:
    /// Looks up the tensors of the experts in `held` and of no others.
    /// Errors: not_found, incompatible (tensors that are absent or have another type or shape: the
    /// first three names and their number).
    static Result<std::unique_ptr<CheckpointStore>> create(
        const model::Model& model, const model::Placement& held,
        storage::DirectFile::Mode mode = storage::DirectFile::Mode::direct_if_possible);

    std::uint64_t record_bytes() const noexcept override { return record_.bytes(); }
    Result<std::span<const std::byte>> read(ExpertKey key, std::span<std::byte> slot) override;
    StoreCounts counts() const noexcept override;

    const ExpertRecord& record() const noexcept { return record_; }
    /// For people: why some experts are read through the page cache; empty if none is.
    const std::string& why_buffered() const noexcept { return why_buffered_; }

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
    Status open_files(storage::DirectFile::Mode mode);
    const Places* places_of(ExpertKey key) const noexcept;
    bool is_one_run(const Places& places) const noexcept;
    Result<std::span<const std::byte>> read_blocks(const storage::DirectFile& file,
                                                   std::uint64_t offset, std::span<std::byte> slot);
    Status read_parts(const Places& places, std::span<std::byte> record);
    void count(std::uint64_t read_bytes, std::uint64_t rounding_bytes) noexcept;
    Error bad_group(ExpertKey key, const ExpertRecord::BadGroup& bad) const;

    std::shared_ptr<const storage::Checkpoint> checkpoint_;
    model::ModelConfig config_;
    ExpertRecord record_;
    std::vector<std::uint32_t> index_;  // [n_layers * n_experts], into places_, or kNone
    std::vector<Places> places_;
    std::vector<std::optional<storage::DirectFile>> files_;  // [n_shards], those with direct reads
    std::string why_buffered_;
    std::atomic<std::uint64_t> read_bytes_{0};
    std::atomic<std::uint64_t> rounding_bytes_{0};
    std::atomic<std::uint64_t> runs_{0};
};

}  // namespace k3::experts
