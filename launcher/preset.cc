#include "launcher/preset.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <limits>
#include <utility>

#include "common/base/settings.h"
#include "common/model/memory_plan.h"
#include "common/model/tensor_names.h"
#include "common/model/weight_plan.h"
#include "common/pack/trunk_run.h"
#include "launcher/pipeline_file.h"
#include "launcher/plan_memory.h"
#include "launcher/plan_model.h"
#include "launcher/run_directory.h"

namespace k3::launcher {

namespace {

struct NamedSize {
    const char* name;
    std::uint64_t gib;
};
constexpr std::array<NamedSize, 5> kSizes = {
    {{"8g", 8}, {"16g", 16}, {"32g", 32}, {"64g", 64}, {"128g", 128}}};

// Rows of a step: fewer make prefill slower and take less memory.
constexpr std::array<std::uint64_t, 3> kStepRows = {256, 64, 16};
constexpr std::uint64_t kFewestPositions = 4096;  // of one session, in the smallest configuration
constexpr std::uint64_t kManyPositions = 131072;  // of all sessions together; more is for caches

struct Budgets {
    std::uint64_t rows = 0;
    std::uint64_t weights_bytes = 0;  // 0: all of them
    std::uint64_t session_bytes = 0;
    std::uint64_t cache_bytes = 0;
};

std::string quoted(const std::string& text) {
    std::string out = "\"";
    for (char c : text) {
        if (c == '"' || c == '\\') out += '\\';
        out += c;
    }
    return out + "\"";
}

/// "pack = FILE" or a list of them, and a newline, if there are any.
std::string pack_line(const std::vector<std::filesystem::path>& packs) {
    if (packs.empty()) return "";
    std::vector<std::string> files;
    for (const std::filesystem::path& pack : packs)
        files.push_back(quoted(std::filesystem::absolute(pack).string()));
    const std::string text = fmt::format("{}", fmt::join(files, ", "));
    return packs.size() == 1 ? fmt::format("pack = {}\n", text)
                             : fmt::format("pack = [{}]\n", text);
}

std::string text_of(const Preset& preset, const ModelFiles& files, const Budgets& budgets) {
    return fmt::format(
        "# Budgets for {} bytes of memory, written by `k3pipe init --preset {}`.\n"
        "# `k3pipe plan -c THIS_FILE` shows every byte of them.\n"
        "\n"
        "[pipeline]\n"
        "model = {}\n"
        "\n"
        "[trunk]\n"
        "{}"
        "max_step_rows = {}\n"
        "weights_bytes = {}{}\n"
        "session_bytes = {}\n"
        "\n"
        "[experts]\n"
        "{}"
        "max_call_rows = {}\n"
        "cache_bytes = {}\n"
        "\n"
        "[gateway]\n"
        "prefill_chunk = {}\n",
        preset.bytes, preset.name, quoted(std::filesystem::absolute(files.directory).string()),
        pack_line(files.trunk_pack), budgets.rows, budgets.weights_bytes,
        budgets.weights_bytes == 0 ? "  # all of them" : "", budgets.session_bytes,
        pack_line(files.experts_pack.empty()
                      ? std::vector<std::filesystem::path>{}
                      : std::vector<std::filesystem::path>{files.experts_pack}),
        budgets.rows, budgets.cache_bytes, budgets.rows);
}

Result<PipelinePlan> plan_of(const std::string& text) {
    ASSIGN_OR_RETURN(const PipelineSpec spec, parse_pipeline(text, "preset.toml"));
    return make_plan(spec, run_base({}) / spec.name, 0);
}

/// Deals out memory to one pipeline file.
class Dealer {
  public:
    Dealer(const Preset& preset, const ModelFiles& files, const StageWeights& weights,
           const MachineCores& machine)
        : preset_(preset),
          files_(files),
          weights_(weights),
          machine_(machine),
          config_(weights.models.begin()->second.config),
          session_(model::session_size(config_, {0, config_.n_layers}, machine.allowed.size())) {}

    Result<std::string> run() {
        // Any budget tells what the smallest is; this one is never too small.
        model::WeightPlanOptions all;
        all.n_layers = config_.n_layers;
        all.budget_bytes = std::numeric_limits<std::uint64_t>::max() / 16;
        if (!files_.trunk_pack.empty())
            all.units = pack::read_units(config_, {0, config_.n_layers});
        ASSIGN_OR_RETURN(const model::WeightPlan plan, model::plan_weights(config_, all));
        fewest_weights_ = plan.smallest_bytes;
        std::uint64_t smallest = 0;
        for (std::uint64_t rows : kStepRows) {
            Budgets budgets{rows, fewest_weights_, session_.bytes(positions(kFewestPositions)),
                            std::min(model::kFewestExpertSlots, n_experts()) * slot()};
            ASSIGN_OR_RETURN(smallest, planned_bytes(budgets));
            if (smallest > preset_.bytes) continue;
            deal(preset_.bytes - smallest, budgets);
            return text(budgets);
        }
        return Error{
            ErrorCode::resource_exhausted,
            fmt::format("the smallest configuration of {} takes {} bytes of memory, and "
                        "preset {} allows {}",
                        config_.name, grouped(smallest), preset_.name, grouped(preset_.bytes)),
            "choose a larger preset, or spread the layers over several boxes"};
    }

  private:
    void deal(std::uint64_t rest, Budgets& budgets) const {
        // Sessions get an eighth at most: a position takes far less than an expert.
        const std::uint64_t wanted = session_.bytes(positions(kManyPositions));
        const std::uint64_t more =
            std::min(rest / 8, wanted - std::min(wanted, budgets.session_bytes));
        budgets.session_bytes += more;
        rest -= more;
        // As many experts as a row uses at a time, so that their reads overlap. Then the trunk:
        // every byte of it that is kept saves a byte for each token, and no cache of experts does
        // better.
        const std::uint64_t all = n_experts() * slot();
        const std::uint64_t passing =
            std::min({all - std::min(all, budgets.cache_bytes),
                      std::uint64_t{config_.moe.top_k} * slot(), rest / slot() * slot()});
        budgets.cache_bytes += passing;
        rest -= passing;
        const std::uint64_t all_weights =
            model::resident_weight_bytes(config_, {0, config_.n_layers});
        if (budgets.weights_bytes + rest < all_weights) {
            budgets.weights_bytes += rest;
            return;
        }
        rest -= all_weights - std::min(all_weights, budgets.weights_bytes);
        budgets.weights_bytes = 0;
        budgets.cache_bytes = std::min(all, budgets.cache_bytes + rest / slot() * slot());
    }

    Result<std::uint64_t> planned_bytes(const Budgets& budgets) const {
        ASSIGN_OR_RETURN(const PipelinePlan plan, plan_of(text(budgets)));
        ASSIGN_OR_RETURN(const PipelineMemory memory, plan_memory(plan, weights_, machine_, 0));
        return memory.bytes();
    }

    std::string text(const Budgets& budgets) const { return text_of(preset_, files_, budgets); }
    std::uint64_t positions(std::uint64_t wanted) const {
        return std::min(wanted, config_.max_positions);
    }
    std::uint64_t slot() const { return model::expert_slot_bytes(model::expert_bytes(config_)); }
    std::uint64_t n_experts() const {
        return std::uint64_t{config_.n_layers - config_.first_k_dense} * config_.moe.n_experts;
    }

    const Preset& preset_;
    const ModelFiles& files_;
    const StageWeights& weights_;
    const MachineCores& machine_;
    const model::ModelConfig config_;
    const model::SessionSize session_;
    std::uint64_t fewest_weights_ = 0;
};

}  // namespace

std::vector<std::string> preset_names() {
    std::vector<std::string> names = {"auto"};
    for (const NamedSize& size : kSizes) names.emplace_back(size.name);
    names.emplace_back("max");
    return names;
}

Result<Preset> find_preset(const std::string& name, const AvailableMemory& available) {
    if (name == "auto") return Preset{name, available.bytes / 5 * 4};
    if (name == "max") return Preset{name, available.bytes / 20 * 19};
    for (const NamedSize& size : kSizes)
        if (name == size.name) return Preset{name, (size.gib << 30U) / 20 * 19};
    return Error{ErrorCode::invalid_argument, fmt::format("there is no preset '{}'", name),
                 fmt::format("choose one of {}", fmt::join(preset_names(), ", "))};
}

Result<StageWeights> open_files(const ModelFiles& files, Models opened) {
    ASSIGN_OR_RETURN(const PipelinePlan plan, plan_of(text_of({}, files, {})));
    return open_weights(plan, std::move(opened));
}

Result<std::string> preset_file(const Preset& preset, const ModelFiles& files,
                                const StageWeights& weights, const MachineCores& machine) {
    return Dealer(preset, files, weights, machine).run();
}

}  // namespace k3::launcher
