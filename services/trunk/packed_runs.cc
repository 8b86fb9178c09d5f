#include "services/trunk/packed_runs.h"

#include <algorithm>
#include <string>
#include <utility>

#include "common/pack/holdings.h"

namespace k3::trunk {

namespace {

/// Read at a time: enough for the device's rate, little enough to stop within a moment.
constexpr std::uint64_t kReadBytes = std::uint64_t{64} << 20U;

}  // namespace

Result<PackedRuns> PackedRuns::load(const pack::Pack& pack, const model::ModelConfig& config,
                                    LayerRange range, const LoadProgress& progress) {
    RETURN_IF_ERROR(pack::check_runs(pack, config, range));
    PackedRuns loaded;
    std::uint64_t total = 0;
    std::uint64_t done = 0;
    for (pack::TrunkRun& run : pack::trunk_runs(config, range.first, range.count)) {
        total += pack.find(run.key())->stored_bytes();
        loaded.runs_.push_back({std::move(run), {}});
    }
    for (Loaded& run : loaded.runs_) {
        const std::string what = pack::run_name(run.layout.key());
        const pack::Entry& entry = *pack.find(run.layout.key());
        ASSIGN_OR_RETURN(run.memory, MemoryBlock::create(entry.stored_bytes(), what.c_str()));
        const std::uint64_t step = std::max<std::uint64_t>(1, kReadBytes / entry.piece_bytes);
        for (std::uint64_t first = 0; first < entry.n_pieces(); first += step) {
            if (progress && !progress(done, total, what))
                return Error{ErrorCode::cancelled, "loading stopped before " + what, ""};
            const pack::Pack::Pieces pieces{first, std::min(step, entry.n_pieces() - first)};
            const std::uint64_t bytes = pack::Pack::bytes_of(entry, pieces);
            RETURN_IF_ERROR(pack.read(entry, pieces,
                                      run.memory.span().subspan(first * entry.piece_bytes, bytes)));
            done += bytes;
        }
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
