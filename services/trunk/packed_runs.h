#pragma once
// The runs of a trunk pack in memory: each read whole, past the page cache, and verified, with its
// tensors where they lie in it.

#include <cstdint>
#include <span>
#include <vector>

#include "common/base/memory_block.h"
#include "common/base/result.h"
#include "common/model/config.h"
#include "common/pack/trunk_packs.h"
#include "common/pack/trunk_run.h"
#include "services/trunk/layer_range.h"
#include "services/trunk/weights.h"

namespace k3::trunk {

class PackedRuns {
  public:
    /// Errors: those of pack::check_runs and Pack::read, cancelled.
    static Result<PackedRuns> load(const pack::TrunkPacks& packs, const model::ModelConfig& config,
                                   LayerRange range, const LoadProgress& progress);

    /// The tensor's bytes, as the checkpoint stores them; they stay where they are as long as this
    /// lives, also when it is moved. Error: incompatible (no run holds such a tensor).
    Result<std::span<const std::byte>> find(const storage::TensorSpec& spec) const;

    std::uint64_t bytes() const noexcept;

  private:
    struct Loaded {
        pack::TrunkRun layout;
        MemoryBlock memory;
    };
    std::vector<Loaded> runs_;
};

/// The error for a tensor that a pack should hold and does not.
Error no_run_holds(const storage::TensorSpec& spec);

}  // namespace k3::trunk
