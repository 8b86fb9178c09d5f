// `k3pipe plan`: what would start, with exact command lines, memory and bytes read per token.

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <map>

#include "common/base/settings.h"
#include "common/model/load.h"
#include "common/model/placement.h"
#include "common/model/tensor_names.h"
#include "launcher/commands.h"
#include "launcher/pipeline_file.h"
#include "launcher/plan_model.h"
#include "launcher/run_directory.h"
#include "launcher/stage_cores.h"
#include "launcher/stage_plan.h"
#include "launcher/words.h"

namespace k3::launcher {

using msg::ServiceKind;

namespace {

const std::string* setting(const StagePlan& stage, std::string_view name) {
    for (const ServiceSetting& candidate : stage.settings)
        if (candidate.name == name && !candidate.values.empty()) return &candidate.values.front();
    return nullptr;
}

/// Layers [first, last] of a trunk stage.
struct Range {
    std::uint32_t first;
    std::uint32_t last;
};

Range layers_of(const StagePlan& stage, const model::ModelConfig& config) {
    Range range{0, config.n_layers - 1};
    const std::string* text = setting(stage, "layers");
    if (text == nullptr || *text == "all") return range;
    std::size_t dash = text->find('-');
    const char* end = text->data() + text->size();
    std::from_chars(text->data(), end, range.first);
    range.last = range.first;
    if (dash != std::string::npos) std::from_chars(text->data() + dash + 1, end, range.last);
    range.last = std::min(range.last, config.n_layers - 1);
    return range;
}

std::uint64_t trunk_bytes(const model::ModelConfig& config, Range range) {
    std::uint64_t sum = 0;
    for (std::uint32_t layer = range.first; layer <= range.last; ++layer)
        sum += storage::total_bytes(model::trunk_layer_tensors(config, layer));
    // The first stage holds the embedding, the last one the head; model-level tensors are both.
    std::vector<model::TensorSpec> level = model::model_level_tensors(config);
    bool first = range.first == 0;
    bool last = range.last + 1 == config.n_layers;
    std::erase_if(level, [&](const model::TensorSpec& tensor) {
        bool embedding = tensor.name.find("embed_tokens") != std::string::npos;
        return embedding ? !first : !last;
    });
    return sum + storage::total_bytes(level);
}

/// State of one session in these layers: fixed bytes, and bytes for each position.
struct SessionBytes {
    std::uint64_t fixed = 0;
    std::uint64_t per_position = 0;
};

SessionBytes session_bytes(const model::ModelConfig& config, Range range) {
    SessionBytes bytes;
    const std::uint64_t kda_width = config.kda.width();
    for (std::uint32_t layer = range.first; layer <= range.last; ++layer) {
        if (config.layer_kinds[layer] == model::LayerKind::kda)
            bytes.fixed += 4 * (kda_width * config.kda.head_dim +               // the matrices
                                3 * kda_width * (config.kda.conv_kernel - 1));  // q, k, v history
        else
            bytes.per_position += 4ULL * (config.mla.kv_lora_rank + config.mla.qk_rope_head_dim);
    }
    return bytes;
}

Result<std::string> memory_of(const StagePlan& stage, const model::Model& model) {
    const model::ModelConfig& config = model.config;
    if (stage.kind == ServiceKind::trunk) {
        Range range = layers_of(stage, config);
        SessionBytes session = session_bytes(config, range);
        const std::string* budget = setting(stage, "session_bytes");
        return fmt::format(
            "layers {}-{}: weights {}; a session {} and {} per position{}", range.first, range.last,
            format_bytes(trunk_bytes(config, range)), format_bytes(session.fixed),
            format_bytes(session.per_position),
            budget == nullptr ? "" : fmt::format(", all of them at most {}", *budget));
    }
    if (stage.kind == ServiceKind::experts) {
        const std::string* share = setting(stage, "share");
        ASSIGN_OR_RETURN(model::Placement placement,
                         model::parse_share(share == nullptr ? "all" : *share, config));
        const std::string* cache = setting(stage, "cache_bytes");
        return fmt::format(
            "share '{}': {} experts, {} on disk; cache {}", share == nullptr ? "all" : *share,
            placement.count(), format_bytes(placement.count() * model::expert_bytes(config)),
            cache == nullptr ? "as k3-experts --help says" : fmt::format("at most {}", *cache));
    }
    return std::string();
}

using Models = std::map<std::filesystem::path, model::Model>;

/// ": MEMORY; CORES", whichever there are.
Result<std::string> facts_of(const StagePlan& stage, const Models& models,
                             const MachineCores& cores_here) {
    std::string facts;
    if (!stage.model.empty()) {
        ASSIGN_OR_RETURN(facts, memory_of(stage, models.at(stage.model)));
    }
    ASSIGN_OR_RETURN(const std::string cores, describe_cores(stage, cores_here));
    if (!facts.empty() && !cores.empty()) facts += "; ";
    facts += cores;
    return facts.empty() ? facts : ": " + facts;
}

Status print_plan(const PlanCommand& command) {
    ASSIGN_OR_RETURN(std::filesystem::path config, config_or_default(command.config));
    ASSIGN_OR_RETURN(PipelineSpec spec, load_pipeline(config));
    if (!command.name.empty()) spec.name = command.name;
    std::filesystem::path base = run_base(command.run_dir.empty() ? spec.run_dir : command.run_dir);
    // Run id 0: a process started by hand belongs to no run.
    ASSIGN_OR_RETURN(PipelinePlan plan, make_plan(spec, base / spec.name, 0));
    Models models;
    for (const StagePlan& stage : plan.stages)
        if (!stage.model.empty() && !models.contains(stage.model)) {
            ASSIGN_OR_RETURN(model::Model opened, model::open_model(stage.model));
            RETURN_IF_ERROR(check_complete(opened));
            models.emplace(stage.model, std::move(opened));
        }
    const MachineCores cores_here = machine_cores();
    fmt::print("pipeline '{}' of {}: {} to start, {} attached\n\n", plan.name, spec.file.string(),
               plan.n_owned(), plan.stages.size() - plan.n_owned());
    fmt::print("mkdir -p -m 700 {}\n", shell_line({plan.run_directory.string()}));
    for (const StagePlan& stage : plan.stages) {
        if (!stage.owned) {
            fmt::print("\n# {}: attached at {}, not started\n", stage.name, stage.endpoint);
            continue;
        }
        ASSIGN_OR_RETURN(const std::string facts, facts_of(stage, models, cores_here));
        std::vector<std::string> words;
        for (const auto& [name, value] : stage.env)
            words.push_back(fmt::format("{}={}", name, value));
        words.insert(words.end(), stage.argv.begin(), stage.argv.end());
        fmt::print("\n# {}{}\n{}\n", stage.name, facts, shell_line(words));
    }
    for (const auto& [path, model] : models) fmt::print("\n{}", model_table(model));
    return Status::ok();
}

}  // namespace

int plan(const PlanCommand& command) {
    Status printed = print_plan(command);
    return printed.has_value() ? kExitOk : report(printed.error());
}

}  // namespace k3::launcher
