#include "common/pack/holdings.h"

#include <fmt/format.h>

#include <vector>

#include "common/model/tensor_names.h"
#include "common/pack/trunk_run.h"

namespace k3::pack {

namespace {

/// Budgets are planned for the pieces that `k3pipe pack` of this build makes.
Status check_pieces(const Pack& pack, const Entry& found, const Entry& made) {
    if (found.piece_bytes == made.piece_bytes) return Status::ok();
    return Error{
        ErrorCode::incompatible,
        fmt::format("{}: {} has checksums for {} bytes each, and this build reads {}",
                    pack.path().string(), run_name(found.key), found.piece_bytes, made.piece_bytes),
        "make the pack again with k3pipe pack trunk"};
}

}  // namespace

Status check_runs(const TrunkPacks& packs, const model::ModelConfig& config,
                  model::LayerRange range) {
    std::size_t n_absent = 0;
    std::string first;
    const std::vector<TrunkRun> runs = trunk_runs(config, range.first, range.count);
    for (const TrunkRun& run : runs) {
        bool is_absent = false;
        for (std::uint32_t i = 0; i < packs.n_parts(); ++i) {
            const Entry made = entry_of(run, packs.part(i).part());
            const Entry* entry = packs.part(i).find(run.key());
            if (entry != nullptr && entry->bytes == made.bytes)
                RETURN_IF_ERROR(check_pieces(packs.part(i), *entry, made));
            else
                is_absent = is_absent || made.bytes > 0;
        }
        if (is_absent && n_absent++ == 0) first = run_name(run.key());
    }
    if (n_absent == 0) return Status::ok();
    return Error{ErrorCode::not_found,
                 fmt::format("{} lacks {} of the {} runs of layers {}-{}, first {}", packs.name(),
                             n_absent, runs.size(), range.first, range.end() - 1, first),
                 "give this stage the layers that the pack was made for, or make another pack"};
}

Status check_records(const Pack& pack, const model::ModelConfig& config,
                     const model::Placement& held) {
    constexpr std::uint64_t kShown = 3;
    const std::uint64_t record_bytes = model::expert_bytes(config);
    std::uint64_t n_absent = 0;
    std::string absent;
    for (std::uint32_t layer = 0; layer < held.n_layers(); ++layer)
        for (std::uint32_t expert = 0; expert < held.n_experts(); ++expert) {
            if (!held.holds(layer, expert)) continue;
            const EntryKey key{layer, expert};
            const Entry* entry = pack.find(key);
            if (entry == nullptr) {
                if (++n_absent <= kShown) absent += (n_absent == 1 ? "" : ", ") + pack.name_of(key);
            } else if (entry->bytes != record_bytes) {
                return Error{ErrorCode::corrupt,
                             fmt::format("{}: {} has {} bytes, and a record of this model has {}",
                                         pack.path().string(), pack.name_of(key), entry->bytes,
                                         record_bytes),
                             "make the pack again with k3pipe pack experts"};
            }
        }
    if (n_absent == 0) return Status::ok();
    return Error{ErrorCode::not_found,
                 fmt::format("{} holds {} experts and lacks {} of the {} of this share: {}{}",
                             pack.path().string(), pack.entries().size(), n_absent, held.count(),
                             absent, n_absent > kShown ? ", ..." : ""),
                 "give this server the share that the pack was made for, or make another pack"};
}

std::string contents(const Pack& pack) {
    const std::span<const Entry> entries = pack.entries();
    if (entries.empty()) return "nothing";
    const std::uint32_t first = entries.front().key.layer;
    const std::uint32_t last = entries.back().key.layer;
    const std::string layers =
        first == last ? fmt::format("layer {}", first) : fmt::format("layers {}-{}", first, last);
    if (pack.kind() == Kind::experts)
        return fmt::format("{} experts of {}", entries.size(), layers);
    std::string text = layers;
    if (pack.part().count > 1)
        text = fmt::format("part {}/{} of {}", pack.part().index, pack.part().count, layers);
    for (const Entry& entry : entries)
        if (entry.key.part != static_cast<std::uint32_t>(RunPart::layer))
            text += ", " + run_name(entry.key);
    return text;
}

std::uint64_t table_memory_bytes(const Pack& pack) noexcept {
    std::uint64_t n_pieces = 0;
    for (const Entry& entry : pack.entries()) n_pieces += entry.n_pieces();
    return pack.entries().size() * sizeof(Entry) + n_pieces * sizeof(std::uint64_t);
}

}  // namespace k3::pack
