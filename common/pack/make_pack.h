#pragma once
// Packs made from a checkpoint; `k3pipe pack`.

#include <cstdint>
#include <filesystem>

#include "common/base/result.h"
#include "common/model/load.h"
#include "common/model/placement.h"
#include "common/pack/pack_writer.h"

namespace k3::pack {

Origin origin_of(const model::Model& model);

/// Layers [first, first + count) of the trunk, which exist; with the embedding if the first layer
/// is among them, with the head if the last one is.
/// `part`: of a pack that is striped over several files.
PackPlan plan_trunk_pack(const model::Model& model, std::uint32_t first, std::uint32_t count,
                         Part part = {});
/// Errors: those of model::check_trunk_tensors, Checkpoint::read_range and write_pack.
Result<PackSummary> make_trunk_pack(const model::Model& model, std::uint32_t first,
                                    std::uint32_t count, const std::filesystem::path& path,
                                    const PackProgress& progress, Part part = {});

/// The experts of `held`, at least one.
PackPlan plan_expert_pack(const model::Model& model, const model::Placement& held);
/// Errors: those of Checkpoint::require, Checkpoint::read and write_pack, corrupt (a weight that
/// fp32 cannot hold).
Result<PackSummary> make_expert_pack(const model::Model& model, const model::Placement& held,
                                     const std::filesystem::path& path,
                                     const PackProgress& progress);

}  // namespace k3::pack
