#pragma once
// Where the trunk's tensors lie on disk, for reads past the page cache.

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "common/base/result.h"
#include "common/model/config.h"
#include "common/model/tensor_names.h"
#include "common/pack/trunk_packs.h"
#include "common/pack/trunk_run.h"
#include "common/storage/checkpoint.h"
#include "common/storage/direct_file.h"
#include "common/storage/read_probe.h"
#include "common/storage/read_source.h"
#include "services/trunk/layer_range.h"

namespace k3::trunk {

class WeightFiles {
  public:
    virtual ~WeightFiles() = default;

    /// Valid as long as this.
    /// Errors: not_found, incompatible (another type or shape), io.
    virtual Result<storage::ReadRange> find(const storage::TensorSpec& spec) = 0;
    /// Of every source: at most so many lanes.
    virtual std::uint32_t n_lanes() const noexcept { return 1; }
    /// Which requests the device likes best, the first of several. Errors: those of
    /// storage::probe_reads.
    virtual Result<storage::ReadProbe> probe() const = 0;
    /// Why reads are buffered, of the first such file; empty if all are direct.
    virtual std::string why_buffered() const = 0;
};

/// The shards of a checkpoint, each opened when a tensor in it is looked up.
class CheckpointFiles final : public WeightFiles {
  public:
    /// Borrows the checkpoint. Errors: those of model::check_trunk_tensors.
    static Result<std::unique_ptr<WeightFiles>> open(const storage::Checkpoint& checkpoint,
                                                     const model::ModelConfig& config,
                                                     LayerRange range,
                                                     storage::DirectFile::Mode mode);

    Result<storage::ReadRange> find(const storage::TensorSpec& spec) override;
    Result<storage::ReadProbe> probe() const override;
    std::string why_buffered() const override;

  private:
    CheckpointFiles(const storage::Checkpoint& checkpoint, storage::DirectFile::Mode mode)
        : checkpoint_(checkpoint), mode_(mode) {}

    const storage::Checkpoint& checkpoint_;
    const storage::DirectFile::Mode mode_;
    std::map<std::uint32_t, storage::DirectFile> shards_;  // a map: its values stay where they are
    const storage::DirectFile* first_ = nullptr;           // that was opened
};

/// The runs of trunk packs. Every read compares checksums.
class PackFiles final : public WeightFiles {
  public:
    /// Borrows the packs. Errors: those of pack::check_runs.
    static Result<std::unique_ptr<WeightFiles>> open(const pack::TrunkPacks& packs,
                                                     const model::ModelConfig& config,
                                                     LayerRange range);

    Result<storage::ReadRange> find(const storage::TensorSpec& spec) override;
    std::uint32_t n_lanes() const noexcept override { return packs_.n_parts(); }
    Result<storage::ReadProbe> probe() const override;
    std::string why_buffered() const override;

  private:
    struct Run {
        pack::TrunkRun layout;
        pack::RunSource source;
    };
    explicit PackFiles(const pack::TrunkPacks& packs) : packs_(packs) {}

    const pack::TrunkPacks& packs_;
    std::vector<Run> runs_;  // of the range; not changed after open()
};

}  // namespace k3::trunk
