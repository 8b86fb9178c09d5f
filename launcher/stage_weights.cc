#include "launcher/stage_weights.h"

#include <fmt/format.h>

#include <algorithm>
#include <iterator>
#include <system_error>
#include <utility>

#include "common/model/layer_range.h"
#include "common/model/placement.h"
#include "common/pack/holdings.h"
#include "common/pack/packed_model.h"
#include "launcher/plan_model.h"

namespace k3::launcher {

namespace fs = std::filesystem;
using msg::ServiceKind;

namespace {

bool reads_weights(const StagePlan& stage) {
    return stage.kind == ServiceKind::trunk || stage.kind == ServiceKind::experts;
}

class Opener {
  public:
    Opener(const PipelinePlan& plan, Models opened) : plan_(plan) {
        weights_.models = std::move(opened);
    }

    Result<StageWeights> run() {
        for (const StagePlan& stage : plan_.stages) {
            if (!stage.owned || stage.model.empty()) continue;
            Status opened = open(stage);
            if (!opened.has_value()) return std::move(opened).error().with_context(stage.name);
        }
        return std::move(weights_);
    }

  private:
    Status open(const StagePlan& stage) {
        if (!weights_.models.contains(stage.model)) {
            ASSIGN_OR_RETURN(model::Model opened, open_directory(stage.model));
            weights_.models.emplace(stage.model, std::move(opened));
        }
        if (!reads_weights(stage)) return Status::ok();
        model::Model& model = weights_.models.at(stage.model);
        if (!settings_of(stage, "pack").empty()) return open_packed(stage, model);
        if (model.checkpoint == nullptr)
            return Error{ErrorCode::not_found,
                         fmt::format("{} holds config.json and no shards of the checkpoint",
                                     stage.model.string()),
                         "copy the shards and their index there, or give this stage a pack with "
                         "pack = \"FILE\""};
        if (std::ranges::find(weights_.checkpoints, stage.model) == weights_.checkpoints.end())
            weights_.checkpoints.push_back(stage.model);
        return Status::ok();
    }

    Status open_packed(const StagePlan& stage, model::Model& model) {
        std::vector<std::shared_ptr<const pack::Pack>> packs;
        for (const std::string& file : settings_of(stage, "pack")) {
            const fs::path path = file;
            if (!weights_.packs.contains(path)) {
                ASSIGN_OR_RETURN(auto opened, open_pack(path, stage.model, model));
                weights_.packs.emplace(path, std::move(opened));
            } else {
                RETURN_IF_ERROR(pack::check_origin(*weights_.packs.at(path), stage.model, model));
            }
            packs.push_back(weights_.packs.at(path));
        }
        if (stage.kind == ServiceKind::trunk) {
            ASSIGN_OR_RETURN(const pack::TrunkPacks parts, pack::TrunkPacks::of(std::move(packs)));
            ASSIGN_OR_RETURN(const model::LayerRange range,
                             model::parse_layers(setting_of(stage, "layers", "all"), model.config));
            return pack::check_runs(parts, model.config, range);
        }
        const pack::Pack& pack = *packs.back();  // the service takes one
        RETURN_IF_ERROR(pack.check_kind(pack::Kind::experts));
        ASSIGN_OR_RETURN(const model::Placement held,
                         model::parse_share(setting_of(stage, "share", "all"), model.config));
        return pack::check_records(pack, model.config, held);
    }

    const PipelinePlan& plan_;
    StageWeights weights_;
};

}  // namespace

std::vector<fs::path> StageWeights::files() const {
    std::vector<fs::path> all;
    for (const auto& [path, pack] : packs) all.push_back(path);
    for (const fs::path& directory : checkpoints) {
        const std::vector<fs::path> shards = shard_paths(*models.at(directory).checkpoint);
        all.insert(all.end(), shards.begin(), shards.end());
    }
    return all;
}

std::vector<std::string> settings_of(const StagePlan& stage, std::string_view name) {
    for (const ServiceSetting& candidate : stage.settings)
        if (candidate.name == name) return candidate.values;
    return {};
}

std::string setting_of(const StagePlan& stage, std::string_view name, std::string otherwise) {
    const std::vector<std::string> values = settings_of(stage, name);
    return values.empty() ? otherwise : values.back();
}

bool has_checkpoint(const fs::path& directory) {
    std::error_code ignored;
    return fs::exists(directory / storage::kIndexName, ignored);
}

Result<model::Model> open_directory(const fs::path& directory) {
    if (has_checkpoint(directory)) {
        ASSIGN_OR_RETURN(model::Model model, model::open_model(directory));
        RETURN_IF_ERROR(check_complete(model));
        return model;
    }
    model::Model model;
    ASSIGN_OR_RETURN(model.config, model::load_config(directory));
    return model;
}

Result<std::shared_ptr<const pack::Pack>> open_pack(const fs::path& path, const fs::path& directory,
                                                    model::Model& model) {
    ASSIGN_OR_RETURN(auto pack, pack::Pack::open(path));
    RETURN_IF_ERROR(pack::check_origin(*pack, directory, model));
    if (model.fingerprint.empty()) model.fingerprint = pack->origin().fingerprint;
    return pack;
}

Result<StageWeights> open_weights(const PipelinePlan& plan, Models opened) {
    return Opener(plan, std::move(opened)).run();
}

std::string pack_table(const Packs& packs) {
    std::string text;
    for (const auto& [path, pack] : packs)
        fmt::format_to(std::back_inserter(text), "  {} pack {}: {}, {} bytes\n",
                       to_string(pack->kind()), path.string(), pack::contents(*pack),
                       grouped(pack->file_bytes()));
    return text;
}

}  // namespace k3::launcher
