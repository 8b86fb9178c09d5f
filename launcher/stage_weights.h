#pragma once
// Where the stages of a pipeline read their weights: checkpoints and packs, opened, compared with
// one another, and found to hold what each stage needs, before anything is started.

#include <filesystem>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "common/base/result.h"
#include "common/model/load.h"
#include "common/pack/pack.h"
#include "launcher/stage_plan.h"

namespace k3::launcher {

/// By directory. One without shards has a config only: its `checkpoint` is null, and its
/// fingerprint is that of the packs beside it, or empty.
using Models = std::map<std::filesystem::path, model::Model>;
/// By file.
using Packs = std::map<std::filesystem::path, std::shared_ptr<const pack::Pack>>;

struct StageWeights {
    Models models;
    Packs packs;
    std::vector<std::filesystem::path> checkpoints;  // directories that some stage reads from

    /// All files that weights are read from when the pipeline runs.
    std::vector<std::filesystem::path> files() const;
};

/// The values of a setting of the service that the stage's table or the plan gives.
std::vector<std::string> settings_of(const StagePlan& stage, std::string_view name);
/// The last of them.
std::string setting_of(const StagePlan& stage, std::string_view name, std::string otherwise);

/// Whether the directory is a checkpoint, and not just a place for config.json.
bool has_checkpoint(const std::filesystem::path& directory);

/// The directory as a checkpoint, complete to the last tensor, or as the place of a config.
/// Errors: those of model::open_model and check_complete, or of model::load_config.
Result<model::Model> open_directory(const std::filesystem::path& directory);

/// A pack of `model`, whose fingerprint becomes that of the pack if there is none yet.
/// Errors: those of Pack::open and pack::check_origin.
Result<std::shared_ptr<const pack::Pack>> open_pack(const std::filesystem::path& path,
                                                    const std::filesystem::path& directory,
                                                    model::Model& model);

/// Of the stages that are started here. `opened`: models that have been opened already.
/// Errors: those of open_directory, open_pack, pack::check_runs and check_records; not_found (a
/// stage that needs weights has neither shards nor a pack); all with the stage's name.
Result<StageWeights> open_weights(const PipelinePlan& plan, Models opened = {});

/// One line for each pack: what it holds and weighs; empty if there is none.
std::string pack_table(const Packs& packs);

}  // namespace k3::launcher
