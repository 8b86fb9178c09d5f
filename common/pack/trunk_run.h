#pragma once
// How the tensors of the trunk lie in the runs of a trunk pack.
//
// A run is what a stage needs at one time: a layer, the embedding, or what follows the last layer.
// The layout is a function of the config alone, so the pack does not store it: a pack of another
// config has another digest in its header.

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "common/model/config.h"
#include "common/model/layer_range.h"
#include "common/model/tensor_names.h"
#include "common/model/weight_plan.h"
#include "common/pack/format.h"

namespace k3::pack {

/// EntryKey::part of a trunk pack. The embedding counts as a part of layer 0, the head (final norm,
/// output residual, lm_head) as one of the last layer: whoever holds that layer needs it.
enum class RunPart : std::uint32_t { layer = 0, embedding = 1, head = 2 };

/// "layer 4", "the embedding", "the output head".
std::string run_name(EntryKey key);

/// Of each tensor inside its run: the kernels load whole vectors.
inline constexpr std::uint64_t kTensorAlignment = 64;

struct PlacedTensor {
    storage::TensorSpec spec;
    std::uint64_t offset = 0;  // of its first byte, from the beginning of the run
};

class TrunkRun {
  public:
    static TrunkRun of_layer(const model::ModelConfig& config, std::uint32_t layer);
    static TrunkRun of_embedding(const model::ModelConfig& config);
    static TrunkRun of_head(const model::ModelConfig& config);

    EntryKey key() const noexcept { return key_; }
    /// In the order of model::trunk_layer_tensors or model_level_tensors.
    const std::vector<PlacedTensor>& tensors() const noexcept { return tensors_; }
    /// Null if the run has no tensor of this name.
    const PlacedTensor* find(std::string_view name) const noexcept;
    /// Null if it has none of this name, type and shape.
    const PlacedTensor* find(const storage::TensorSpec& spec) const noexcept;
    /// From the first tensor to the end of the last one.
    std::uint64_t bytes() const noexcept { return bytes_; }

  private:
    TrunkRun(EntryKey key, std::vector<storage::TensorSpec> tensors);

    EntryKey key_;
    std::vector<PlacedTensor> tensors_;
    std::uint64_t bytes_ = 0;
};

/// Of layers [first, first + count), in order of key; with the embedding if the first layer of the
/// model is among them, with the head if the last one is.
std::vector<TrunkRun> trunk_runs(const model::ModelConfig& config, std::uint32_t first,
                                 std::uint32_t count);

/// The entry of a run, not laid out yet. Where weights are streamed, reads take the whole pieces
/// around some rows of a matrix: pieces of 64 KiB add 0.2 % to the 32 MiB that are read at a time,
/// and the checksums of the released trunk take 14 MB of memory. Runs below 16 MiB, whose matrices
/// are small too, have pieces of one block. Of the embedding single rows are read: its pieces are
/// the power of two that holds one, from a block to 16 KiB.
/// With a part: of the stripes that it holds, which may be none (bytes = 0).
Entry entry_of(const TrunkRun& run, Part part = {});

/// Of a run that is striped over several files: what lies together in one of them. 4 MiB are large
/// enough for any disk; small runs have four pieces.
std::uint64_t stripe_bytes(const TrunkRun& run);

/// The largest pieces among the runs of these layers.
model::ReadUnits read_units(const model::ModelConfig& config, model::LayerRange range);

}  // namespace k3::pack
