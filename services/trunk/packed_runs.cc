#include "services/trunk/packed_runs.h"

#include <algorithm>
#include <string>
#include <utility>

namespace k3::trunk {

namespace {

/// Read at a time: enough for the device's rate, little enough to stop within a moment.
constexpr std::uint64_t kReadBytes = std::uint64_t{64} << 20U;

/// Budgets are planned for the pieces that `k3pipe pack` of this build makes.
Status check_pieces(const pack::Pack& pack, const pack::Entry& found, const pack::Entry& made) {
    if (found.piece_bytes == made.piece_bytes) return Status::ok();
    return Error{ErrorCode::incompatible,
                 pack.path().string() + ": " + pack::run_name(found.key) + " has checksums for " +
                     std::to_string(found.piece_bytes) + " bytes each, and this build reads " +
                     std::to_string(made.piece_bytes),
                 "make the pack again with k3pipe pack trunk"};
}

}  // namespace

Status PackedRuns::check(const pack::Pack& pack, const model::ModelConfig& config,
                         LayerRange range) {
    std::size_t n_absent = 0;
    std::string first;
    const std::vector<pack::TrunkRun> runs = pack::trunk_runs(config, range.first, range.count);
    for (const pack::TrunkRun& run : runs) {
        const pack::Entry* entry = pack.find(run.key());
        if (entry != nullptr && entry->bytes == run.bytes()) {
            RETURN_IF_ERROR(check_pieces(pack, *entry, pack::entry_of(run)));
            continue;
        }
        if (n_absent++ == 0) first = pack::run_name(run.key());
    }
    if (n_absent == 0) return Status::ok();
    return Error{ErrorCode::not_found,
                 pack.path().string() + " lacks " + std::to_string(n_absent) + " of the " +
                     std::to_string(runs.size()) + " runs of layers " +
                     std::to_string(range.first) + "-" + std::to_string(range.end() - 1) +
                     ", first " + first,
                 "give this stage the layers that the pack was made for, or make another pack"};
}

Result<PackedRuns> PackedRuns::load(const pack::Pack& pack, const model::ModelConfig& config,
                                    LayerRange range, const LoadProgress& progress) {
    RETURN_IF_ERROR(check(pack, config, range));
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
