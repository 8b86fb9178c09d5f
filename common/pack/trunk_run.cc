#include "common/pack/trunk_run.h"

#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <utility>

namespace k3::pack {

namespace {

constexpr std::uint64_t kMostPieceBytes = std::uint64_t{64} << 10U;
constexpr std::uint64_t kSmallRunBytes = std::uint64_t{16} << 20U;
constexpr std::uint64_t kStripeBytes = std::uint64_t{4} << 20U;
constexpr std::uint64_t kPiecesOfSmallStripe = 4;
constexpr std::uint64_t kMostEmbeddingPieceBytes = std::uint64_t{16} << 10U;

std::uint32_t number(RunPart part) { return static_cast<std::uint32_t>(part); }

std::vector<storage::TensorSpec> level_tensors(const model::ModelConfig& config, bool embedding) {
    std::vector<storage::TensorSpec> tensors = model::model_level_tensors(config);
    std::erase_if(tensors, [embedding](const storage::TensorSpec& tensor) {
        return (tensor.name == model::kEmbeddingTensor) != embedding;
    });
    return tensors;
}

}  // namespace

std::string run_name(EntryKey key) {
    if (key.part == number(RunPart::layer)) return fmt::format("layer {}", key.layer);
    if (key.part == number(RunPart::embedding)) return "the embedding";
    if (key.part == number(RunPart::head)) return "the output head";
    return fmt::format("layer {} part {}", key.layer, key.part);
}

TrunkRun::TrunkRun(EntryKey key, std::vector<storage::TensorSpec> tensors) : key_(key) {
    tensors_.reserve(tensors.size());
    for (storage::TensorSpec& spec : tensors) {
        const std::uint64_t offset =
            (bytes_ + kTensorAlignment - 1) / kTensorAlignment * kTensorAlignment;
        bytes_ = offset + spec.bytes();
        tensors_.push_back({std::move(spec), offset});
    }
}

TrunkRun TrunkRun::of_layer(const model::ModelConfig& config, std::uint32_t layer) {
    return {{layer, number(RunPart::layer)}, model::trunk_layer_tensors(config, layer)};
}

TrunkRun TrunkRun::of_embedding(const model::ModelConfig& config) {
    return {{0, number(RunPart::embedding)}, level_tensors(config, true)};
}

TrunkRun TrunkRun::of_head(const model::ModelConfig& config) {
    return {{config.n_layers - 1, number(RunPart::head)}, level_tensors(config, false)};
}

const PlacedTensor* TrunkRun::find(std::string_view name) const noexcept {
    auto found = std::ranges::find_if(
        tensors_, [name](const PlacedTensor& tensor) { return tensor.spec.name == name; });
    return found == tensors_.end() ? nullptr : &*found;
}

const PlacedTensor* TrunkRun::find(const storage::TensorSpec& spec) const noexcept {
    const PlacedTensor* found = find(spec.name);
    const bool is_same = found != nullptr && found->spec.dtype == spec.dtype &&
                         storage::same_shape(found->spec.shape, spec.shape);
    return is_same ? found : nullptr;
}

std::vector<TrunkRun> trunk_runs(const model::ModelConfig& config, std::uint32_t first,
                                 std::uint32_t count) {
    std::vector<TrunkRun> runs;
    for (std::uint32_t layer = first; layer < first + count; ++layer) {
        runs.push_back(TrunkRun::of_layer(config, layer));
        if (layer == 0) runs.push_back(TrunkRun::of_embedding(config));
        if (layer + 1 == config.n_layers) runs.push_back(TrunkRun::of_head(config));
    }
    return runs;
}

std::uint64_t stripe_bytes(const TrunkRun& run) {
    return run.bytes() < kSmallRunBytes ? kPiecesOfSmallStripe * entry_of(run).piece_bytes
                                        : kStripeBytes;
}

Entry entry_of(const TrunkRun& run, Part part) {
    Entry entry;
    entry.key = run.key();
    entry.bytes = run.bytes();
    if (run.key().part == number(RunPart::embedding)) {
        const storage::TensorSpec& rows = run.tensors().front().spec;
        entry.piece_bytes =
            std::clamp<std::uint64_t>(std::bit_ceil(rows.bytes() / rows.shape[0]),
                                      storage::kBlockBytes, kMostEmbeddingPieceBytes);
    } else {
        entry.piece_bytes = run.bytes() < kSmallRunBytes ? storage::kBlockBytes : kMostPieceBytes;
    }
    if (part.count > 1) {
        const std::uint64_t stripe = stripe_bytes(run);
        entry.bytes = 0;
        for (std::uint64_t at = part.index * stripe; at < run.bytes(); at += part.count * stripe)
            entry.bytes += std::min(stripe, run.bytes() - at);
    }
    return entry;
}

model::ReadUnits read_units(const model::ModelConfig& config, model::LayerRange range) {
    model::ReadUnits units;
    for (const TrunkRun& run : trunk_runs(config, range.first, range.count)) {
        std::uint64_t& unit =
            run.key().part == number(RunPart::embedding) ? units.embedding : units.matrices;
        unit = std::max(unit, entry_of(run).piece_bytes);
    }
    return units;
}

}  // namespace k3::pack
