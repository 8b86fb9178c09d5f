#include "services/trunk/packed_runs.h"

#include <string>
#include <utility>

#include "common/pack/holdings.h"
#include "common/storage/read_pool.h"

namespace k3::trunk {

Result<PackedRuns> PackedRuns::load(const pack::TrunkPacks& packs, const model::ModelConfig& config,
                                    LayerRange range, const LoadProgress& progress) {
    RETURN_IF_ERROR(pack::check_runs(packs, config, range));
    PackedRuns loaded;
    std::uint64_t total = 0;
    for (pack::TrunkRun& run : pack::trunk_runs(config, range.first, range.count)) {
        total += storage::block_ceiling(run.bytes());
        loaded.runs_.push_back({std::move(run), {}});
    }
    storage::PoolRead read;
    storage::ReadPool pool({storage::ReadShape{}, {}, packs.n_parts()});  // after what it fills
    for (Loaded& run : loaded.runs_) {
        const std::string what = pack::run_name(run.layout.key());
        const auto stops = [&] { return progress && !progress(pool.totals().bytes, total, what); };
        const pack::RunSource source(packs, run.layout);
        ASSIGN_OR_RETURN(run.memory, MemoryBlock::create(source.end(), what.c_str()));
        Status status = Status::ok();
        if (stops()) {
            status = Error{ErrorCode::cancelled, "loading stopped before " + what, ""};
        } else {
            pool.start(read, source, 0, run.memory.span());
            status = pool.wait(read, stops);
            pool.cancel(read);
        }
        RETURN_IF_ERROR(std::move(status));
    }
    return loaded;
}

Result<std::span<const std::byte>> PackedRuns::find(const storage::TensorSpec& spec) const {
    for (const Loaded& run : runs_) {
        const pack::PlacedTensor* tensor = run.layout.find(spec);
        if (tensor == nullptr) continue;
        return std::span<const std::byte>(
            run.memory.span().subspan(tensor->offset, tensor->spec.bytes()));
    }
    return no_run_holds(spec);
}

Error no_run_holds(const storage::TensorSpec& spec) {
    return Error{
        ErrorCode::incompatible,
        "no run of the trunk pack holds " + spec.name + " " + storage::to_string(spec.shape),
        "make the pack again with k3pipe pack trunk"};
}

std::uint64_t PackedRuns::bytes() const noexcept {
    std::uint64_t total = 0;
    for (const Loaded& run : runs_) total += run.memory.size();
    return total;
}

}  // namespace k3::trunk
