#pragma once
// What a pack holds, and whether that is what a server needs.

#include <string>

#include "common/base/result.h"
#include "common/model/config.h"
#include "common/model/layer_range.h"
#include "common/model/placement.h"
#include "common/pack/pack.h"
#include "common/pack/trunk_packs.h"

namespace k3::pack {

/// Of the runs of these layers. Errors: not_found (trunk packs that lack some: how many of how
/// many, and the first), incompatible (a run is cut into other pieces than this build makes).
Status check_runs(const TrunkPacks& packs, const model::ModelConfig& config,
                  model::LayerRange range);

/// Of the records of these experts. Errors: not_found (an expert pack that lacks some: how many of
/// how many, and the first three), corrupt (an entry that is no record of this model).
Status check_records(const Pack& pack, const model::ModelConfig& config,
                     const model::Placement& held);

/// For people: "layers 0-45, the embedding", "part 0/2 of layer 5", "27478 experts of layers 1-92".
std::string contents(const Pack& pack);

/// Memory of an open pack: its list of entries and their checksums.
std::uint64_t table_memory_bytes(const Pack& pack) noexcept;

}  // namespace k3::pack
