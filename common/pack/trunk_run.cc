#include "common/pack/trunk_run.h"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

namespace k3::pack {

namespace {

constexpr std::uint64_t kPieceBytes = std::uint64_t{4} << 20U;
constexpr std::uint64_t kEmbeddingPieceBytes = std::uint64_t{16} << 10U;

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

Entry entry_of(const TrunkRun& run) {
    Entry entry;
    entry.key = run.key();
    entry.bytes = run.bytes();
    entry.piece_bytes =
        run.key().part == number(RunPart::embedding) ? kEmbeddingPieceBytes : kPieceBytes;
    return entry;
}

}  // namespace k3::pack
