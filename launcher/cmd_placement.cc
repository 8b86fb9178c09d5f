// `k3pipe placement`: which expert server holds which experts, made or shown.

#include <fmt/format.h>

#include <algorithm>
#include <optional>
#include <span>

#include "common/base/settings.h"
#include "common/experts/placement_plan.h"
#include "common/experts/simulation.h"
#include "common/model/placement_file.h"
#include "common/model/tensor_names.h"
#include "common/storage/atomic_file.h"
#include "launcher/commands.h"
#include "launcher/paths.h"
#include "launcher/pipeline_file.h"
#include "launcher/plan_model.h"
#include "launcher/server_weights.h"

namespace k3::launcher {

namespace fs = std::filesystem;
using model::PlacementFile;
using model::ServerPlacement;

namespace {

Result<PlacementFile> make_placement(const PlacementCommand& command, const PipelineSpec& spec,
                                     const model::Model& model,
                                     const experts::RoutingTrace* trace) {
    experts::PlacementRequest request;
    ASSIGN_OR_RETURN(request.weights, server_weights(spec));
    request.replicas = command.replicas;
    request.replicated = command.replicated;
    request.trace = trace;
    ASSIGN_OR_RETURN(std::vector<model::Placement> placed,
                     experts::place_experts(request, model.config));
    PlacementFile file{model.fingerprint, {}};
    const auto servers = spec.of_kind(msg::ServiceKind::experts);
    for (std::size_t s = 0; s < servers.size(); ++s)
        file.servers.push_back({servers[s]->name, request.weights[s], std::move(placed[s])});
    return file;
}

/// The part of all picks that each server computes: of the trace's, or, without one, if all experts
/// were picked alike and replicas had a part in proportion to their weight.
std::vector<double> expected_load(const PlacementFile& file, const model::ModelConfig& config,
                                  const experts::Simulation* replayed) {
    std::vector<double> load(file.servers.size());
    double total = 0;
    if (replayed != nullptr) {
        for (std::size_t s = 0; s < load.size(); ++s)
            total += load[s] = static_cast<double>(replayed->boxes[s].used);
    } else {
        for (std::uint32_t layer = config.first_k_dense; layer < config.n_layers; ++layer)
            for (std::uint32_t expert = 0; expert < config.moe.n_experts; ++expert) {
                double weight = 0;
                for (const ServerPlacement& server : file.servers)
                    if (server.held.holds(layer, expert)) weight += server.weight;
                for (std::size_t s = 0; s < load.size(); ++s)
                    if (file.servers[s].held.holds(layer, expert))
                        load[s] += file.servers[s].weight / weight;
                ++total;
            }
    }
    for (double& part : load) part /= total;
    return load;
}

/// For counts only: rates are of no account.
Result<experts::Simulation> replay(const PlacementFile& file, const model::ModelConfig& config,
                                   const experts::RoutingTrace& trace, std::uint32_t n_rows) {
    experts::SimulationOptions options;
    options.rows_per_step = n_rows;
    for (const ServerPlacement& server : file.servers) {
        experts::SimulatedBox& box = options.boxes.emplace_back();
        box.held = server.held;
        box.weight = server.weight;
        box.disk_rate = box.memory_rate = 1;
    }
    return experts::simulate(options, trace, config);
}

Status print_summary(const PlacementFile& file, const model::ModelConfig& config,
                     const experts::RoutingTrace* trace) {
    std::optional<experts::Simulation> replayed;
    if (trace != nullptr) {
        ASSIGN_OR_RETURN(replayed, replay(file, config, *trace, 1));
    }
    const std::vector<double> load =
        expected_load(file, config, replayed.has_value() ? &*replayed : nullptr);
    const std::uint64_t n_experts =
        std::uint64_t{config.n_layers - config.first_k_dense} * config.moe.n_experts;
    fmt::print("{:<22}{:>9}{:>10}{:>22}{:>9}{:>9}\n", "expert server", "weight", "experts",
               "bytes on disk", "share", "load");
    std::uint64_t n_held = 0;
    for (std::size_t s = 0; s < file.servers.size(); ++s) {
        const ServerPlacement& server = file.servers[s];
        const std::uint64_t n = server.held.count();
        n_held += n;
        fmt::print("  {:<20}{:>9}{:>10}{:>22}{:>8.1f}%{:>8.1f}%\n", server.name, server.weight,
                   grouped(n), grouped(n * model::expert_bytes(config)),
                   100.0 * static_cast<double>(n) / static_cast<double>(n_experts),
                   100.0 * load[s]);
    }
    fmt::print("  {} experts, {:.2f} holders of each on average\n", grouped(n_experts),
               static_cast<double>(n_held) / static_cast<double>(n_experts));
    if (replayed.has_value())
        fmt::print("  the trace's calls of one row: the busiest server has {:.3f} times the mean\n",
                   replayed->imbalance);
    return Status::ok();
}

Status write_placement(const fs::path& path, const PlacementFile& file) {
    const std::string text = model::format_placement(file);
    RETURN_IF_ERROR(storage::replace_file(path, text, 0644));
    fmt::print("  written: {} ({} bytes); use it with placement = \"...\" in [pipeline]\n",
               path.string(), grouped(text.size()));
    return Status::ok();
}

Status show_or_make(const PlacementCommand& command) {
    ASSIGN_OR_RETURN(const fs::path config, config_or_default(command.config));
    ASSIGN_OR_RETURN(const PipelineSpec spec, load_pipeline(config));
    if (spec.model.empty())
        return Error{ErrorCode::invalid_argument,
                     fmt::format("{}: no checkpoint is named", spec.file.string()),
                     "set model = \"DIRECTORY\" in [pipeline]"};
    if (!command.out.empty())
        RETURN_IF_ERROR(
            storage::check_replaceable(command.out, model::kPlacementMagic, "a placement"));
    const bool is_made = !command.out.empty() || spec.placement.empty();
    if (!is_made && command.shape_given)
        return Error{ErrorCode::invalid_argument,
                     fmt::format("{} uses the placement {}, which is shown as it is",
                                 spec.file.string(), spec.placement.string()),
                     "give --out FILE to make another one"};
    ASSIGN_OR_RETURN(const model::Model model, model::open_model(spec.model));
    std::optional<experts::RoutingTrace> trace;
    if (!command.trace.empty()) {
        ASSIGN_OR_RETURN(trace, experts::read_trace(command.trace));
    }
    const experts::RoutingTrace* used = trace.has_value() ? &*trace : nullptr;
    Result<PlacementFile> file = is_made ? make_placement(command, spec, model, used)
                                         : model::read_placement(spec.placement, model);
    if (!file.has_value()) return std::move(file).error();
    RETURN_IF_ERROR(print_summary(*file, model.config, used));
    return command.out.empty() ? Status::ok() : write_placement(command.out, *file);
}

}  // namespace

int placement(const PlacementCommand& command) {
    const Status done = show_or_make(command);
    return done.has_value() ? kExitOk : report(done.error());
}

}  // namespace k3::launcher
