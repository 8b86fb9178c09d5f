#pragma once
// The model of a server whose weights lie in a pack.

#include <filesystem>

#include "common/base/result.h"
#include "common/model/load.h"
#include "common/pack/pack.h"

namespace k3::pack {

/// Whether `pack` was made from `model`, which was read from `directory`: by fingerprint, or by
/// config if the model has no fingerprint. Error: incompatible (both named).
Status check_origin(const Pack& pack, const std::filesystem::path& directory,
                    const model::Model& model);

/// Config and fingerprint for a server that reads `pack`. A directory with the index of a
/// checkpoint is opened and must be what the pack was made from. One without (config.json is all
/// that such a server needs on its box) must have the pack's config; then `checkpoint` is null and
/// the fingerprint is the pack's, which the other servers compare with theirs. Errors: those of
/// model::load_config and model::open_model, incompatible (the pack was made from another
/// checkpoint or config, both named).
Result<model::Model> open_packed_model(const std::filesystem::path& directory, const Pack& pack);

}  // namespace k3::pack
