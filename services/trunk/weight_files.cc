#include "services/trunk/weight_files.h"

#include <fmt/format.h>

#include <utility>

#include "common/pack/holdings.h"
#include "services/trunk/packed_runs.h"

namespace k3::trunk {

Result<std::unique_ptr<WeightFiles>> CheckpointFiles::open(const storage::Checkpoint& checkpoint,
                                                           const model::ModelConfig& config,
                                                           LayerRange range,
                                                           storage::DirectFile::Mode mode) {
    RETURN_IF_ERROR(model::check_trunk_tensors(checkpoint, config, range.first, range.count));
    return std::unique_ptr<WeightFiles>(new CheckpointFiles(checkpoint, mode));
}

Result<storage::ReadRange> CheckpointFiles::find(const storage::TensorSpec& spec) {
    ASSIGN_OR_RETURN(const storage::TensorInfo* tensor,
                     checkpoint_.require(spec.name, spec.dtype, spec.shape));
    auto shard = shards_.find(tensor->shard);
    if (shard == shards_.end()) {
        ASSIGN_OR_RETURN(storage::DirectFile file,
                         storage::DirectFile::open(checkpoint_.shard_path(tensor->shard), mode_));
        shard = shards_.emplace(tensor->shard, std::move(file)).first;
        if (first_ == nullptr) first_ = &shard->second;
    }
    return storage::ReadRange{&shard->second, tensor->offset, tensor->bytes};
}

Result<storage::ReadProbe> CheckpointFiles::probe() const {
    if (first_ == nullptr) return storage::ReadProbe{};
    return storage::probe_reads(*first_);
}

std::string CheckpointFiles::why_buffered() const {
    for (const auto& [number, file] : shards_)
        if (!file.is_direct())
            return fmt::format("{}: {}", file.path().string(), file.why_buffered());
    return {};
}

Result<std::unique_ptr<WeightFiles>> PackFiles::open(const pack::TrunkPacks& packs,
                                                     const model::ModelConfig& config,
                                                     LayerRange range) {
    RETURN_IF_ERROR(pack::check_runs(packs, config, range));
    std::unique_ptr<PackFiles> files(new PackFiles(packs));
    for (pack::TrunkRun& run : pack::trunk_runs(config, range.first, range.count)) {
        const pack::RunSource source(packs, run);
        files->runs_.push_back({std::move(run), source});
    }
    return std::unique_ptr<WeightFiles>(std::move(files));
}

Result<storage::ReadRange> PackFiles::find(const storage::TensorSpec& spec) {
    for (const Run& run : runs_)
        if (const pack::PlacedTensor* tensor = run.layout.find(spec))
            return storage::ReadRange{&run.source, tensor->offset, tensor->spec.bytes()};
    return no_run_holds(spec);
}

Result<storage::ReadProbe> PackFiles::probe() const {
    return storage::probe_reads(packs_.part(0).file());
}

std::string PackFiles::why_buffered() const { return packs_.why_buffered(); }

}  // namespace k3::trunk
