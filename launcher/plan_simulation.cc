#include "launcher/plan_simulation.h"

#include <fmt/format.h>

#include <algorithm>
#include <iterator>

#include "common/experts/placement_plan.h"
#include "common/experts/simulation.h"
#include "common/model/layer_range.h"
#include "common/model/model_sizes.h"
#include "common/model/placement_file.h"
#include "launcher/plan_model.h"
#include "launcher/plan_time.h"

namespace k3::launcher {

using experts::SimulatedBox;
using experts::Simulation;
using experts::SimulationOptions;
using msg::ServiceKind;

namespace {

constexpr std::uint32_t kBoxCounts[] = {1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64};

constexpr std::uint64_t kTokenBytes = 24;  // StepRow: what the first stage is told of a row

std::string setting_or(const StagePlan& stage, std::string_view name, std::string otherwise) {
    for (const ServiceSetting& setting : stage.settings)
        if (setting.name == name && !setting.values.empty()) return setting.values.back();
    return otherwise;
}

class BoxSimulator {
  public:
    BoxSimulator(const PlanCommand& command, const PipelinePlan& plan, const model::Model& model,
                 const PipelineMemory& memory, const SimulatedSpeeds& speeds,
                 const experts::RoutingTrace& trace)
        : command_(command),
          plan_(plan),
          model_(model),
          memory_(memory),
          speeds_(speeds),
          trace_(trace) {}

    Result<std::string> run() {
        ASSIGN_OR_RETURN(trunk_s_, trunk_seconds());
        RETURN_IF_ERROR(look_at_trunk_links());
        SimulationOptions options;
        options.rows_per_step = command_.rows;
        for (const StagePlan& stage : plan_.stages) {
            if (stage.kind != ServiceKind::experts) continue;
            ASSIGN_OR_RETURN(SimulatedBox box, box_of(stage));
            options.boxes.push_back(std::move(box));
            names_.push_back(stage.name);
            if (options.boxes.size() == 1)
                options.policy = setting_or(stage, "policy", "rank-weighted");
        }
        for (const StagePlan& stage : plan_.stages)
            if (stage.kind == ServiceKind::trunk && stage.box.link_rate > 0)
                options.trunk_link_rate = static_cast<double>(stage.box.link_rate);
        ASSIGN_OR_RETURN(const Simulation found, experts::simulate(options, trace_, model_.config));
        add_pipeline(options, found);
        RETURN_IF_ERROR(add_equal_boxes(options));
        return std::move(text_);
    }

  private:
    template <typename... Arguments>
    void add(fmt::format_string<Arguments...> format, Arguments&&... arguments) {
        fmt::format_to(std::back_inserter(text_), format, std::forward<Arguments>(arguments)...);
    }

    Result<double> rate_of(std::uint64_t given, const Speed& otherwise, const char* what,
                           const char* key) const {
        if (given > 0) return static_cast<double>(given);
        if (otherwise.bytes_per_s > 0) return otherwise.bytes_per_s;
        return Error{ErrorCode::invalid_argument,
                     fmt::format("no speed of the {} to simulate with ({})", what, otherwise.how),
                     fmt::format("give --{}-rate, or {} in the tables of the boxes", what, key)};
    }

    Result<SimulatedBox> box_of(const StagePlan& stage) const {
        SimulatedBox box;
        ASSIGN_OR_RETURN(model::Share share, share_of(stage));
        box.held = std::move(share.held);
        box.weight = share.weight;
        if (const std::string weight = setting_or(stage, "weight", ""); !weight.empty())
            box.weight = static_cast<std::uint32_t>(std::stoul(weight));  // checked by the file
        if (const auto slots = memory_.slots_of.find(stage.name); slots != memory_.slots_of.end())
            box.cache_slots = slots->second;
        ASSIGN_OR_RETURN(box.disk_rate,
                         rate_of(stage.box.disk_rate, speeds_.disk, "disk", "disk_rate"));
        ASSIGN_OR_RETURN(box.memory_rate,
                         rate_of(stage.box.memory_rate, speeds_.memory, "memory", "memory_rate"));
        box.link_rate =
            static_cast<double>(stage.box.link_rate > 0 ? stage.box.link_rate : command_.link_rate);
        const auto round_trip_us = stage.box.round_trip_us > 0
                                       ? static_cast<double>(stage.box.round_trip_us)
                                       : static_cast<double>(command_.round_trip_us);
        box.round_trip_s = round_trip_us / 1e6;
        return box;
    }

    Result<model::Share> share_of(const StagePlan& stage) const {
        if (stage.owned) return model::read_share(setting_or(stage, "share", "all"), model_);
        if (!plan_.placement.empty())
            return model::read_share(model::share_in_file(plan_.placement, stage.name), model_);
        return Error{
            ErrorCode::invalid_argument,
            fmt::format("'{}' is attached, and nobody here knows what it holds", stage.name),
            "name the placement of the boxes in [pipeline]"};
    }

    Result<double> trunk_seconds() const {
        const TokenReads reads = token_reads(model_.config, memory_);
        const std::uint64_t touched =
            reads.touched_bytes - model::model_sizes(model_.config).picked_bytes;
        ASSIGN_OR_RETURN(const double memory_rate,
                         rate_of(0, speeds_.memory, "memory", "memory_rate"));
        double seconds = static_cast<double>(touched) / memory_rate;
        if (reads.trunk_bytes > 0) {
            ASSIGN_OR_RETURN(const double disk_rate, rate_of(0, speeds_.disk, "disk", "disk_rate"));
            seconds = std::max(seconds, static_cast<double>(reads.trunk_bytes) / disk_rate);
        }
        return seconds;
    }

    /// What a token's row takes to every trunk stage and back. The gateway carries it: the answer
    /// of one stage is the request to the next.
    Status look_at_trunk_links() {
        const model::ModelConfig& config = model_.config;
        const std::uint64_t vector_bytes = std::uint64_t{config.hidden_size} * sizeof(float);
        for (const StagePlan& stage : plan_.stages) {
            if (stage.kind != ServiceKind::trunk) continue;
            ASSIGN_OR_RETURN(const model::LayerRange range,
                             model::parse_layers(setting_or(stage, "layers", "all"), config));
            TrunkLink link;
            link.name = fmt::format("{} (layers {}-{})", stage.name, range.first, range.end() - 1);
            link.bytes_to =
                range.first == 0 ? kTokenBytes : config.vectors_before(range.first) * vector_bytes;
            link.bytes_from = range.end() == config.n_layers
                                  ? std::uint64_t{config.vocab_size} * sizeof(float)
                                  : config.vectors_before(range.end()) * vector_bytes;
            if (!stage.host.empty()) {
                const std::uint64_t rate =
                    stage.box.link_rate > 0 ? stage.box.link_rate : command_.link_rate;
                const auto round_trip_us = stage.box.round_trip_us > 0
                                               ? static_cast<double>(stage.box.round_trip_us)
                                               : static_cast<double>(command_.round_trip_us);
                link.round_trip_s = round_trip_us / 1e6;
                if (rate > 0)
                    link.row_s = static_cast<double>(link.bytes_to + link.bytes_from) /
                                 static_cast<double>(rate);
            }
            trunk_links_.push_back(std::move(link));
        }
        return Status::ok();
    }

    /// Of all steps: a round trip each, and every row.
    double trunk_link_seconds(const Simulation& found) const {
        double seconds = 0;
        for (const TrunkLink& link : trunk_links_)
            seconds += link.round_trip_s * found.n_steps + link.row_s * found.n_rows;
        return seconds;
    }

    double token_seconds(const Simulation& found) const {
        return (found.expert_s + trunk_s_ * found.n_steps + trunk_link_seconds(found)) /
               static_cast<double>(found.n_rows);
    }

    void add_pipeline(const SimulationOptions& options, const Simulation& found) {
        const auto n_rows = static_cast<double>(found.n_rows);
        add("simulated with {}: {} tokens in {} step{}, cold start counted\n",
            command_.simulate.string(), found.n_rows, found.n_steps, found.n_steps == 1 ? "" : "s");
        add("  {:<20}{:>10}{:>11}{:>19}{:>19}{:>11}\n", "each token", "experts", "in memory",
            "bytes from disk", "bytes on the link", "seconds");
        for (std::size_t b = 0; b < names_.size(); ++b) {
            const experts::BoxLoad& load = found.boxes[b];
            const double hits =
                load.used == 0 ? 1
                               : static_cast<double>(load.hits) / static_cast<double>(load.used);
            add("  {:<20}{:>10.1f}{:>10.1f}%{:>19}{:>19}{:>11.3f}\n", names_[b],
                static_cast<double>(load.used) / n_rows,
                100 * (options.boxes[b].cache_slots >= options.boxes[b].held.count() ? 1 : hits),
                grouped(static_cast<std::uint64_t>(static_cast<double>(load.read_bytes) / n_rows)),
                grouped(static_cast<std::uint64_t>(static_cast<double>(load.link_bytes) / n_rows)),
                load.busy_s / n_rows);
        }
        add("  busiest server of a call: {:.3f} times the mean\n", found.imbalance);
        add("  {:<30}{:>19}{:>19}{:>11}\n", "trunk stages, each token", "bytes to it",
            "bytes from it", "seconds");
        for (const TrunkLink& link : trunk_links_)
            add("  {:<30}{:>19}{:>19}{:>11.4f}\n", link.name, grouped(link.bytes_to),
                grouped(link.bytes_from), link.round_trip_s * found.n_steps / n_rows + link.row_s);
        add("  experts {:.3f} s, trunk {:.3f} s, its links {:.3f} s: {:.3f} s for each token, at "
            "most\n",
            found.expert_s / n_rows, trunk_s_ * found.n_steps / n_rows,
            trunk_link_seconds(found) / n_rows, token_seconds(found));
    }

    Status add_equal_boxes(const SimulationOptions& options) {
        add("\n{:<22}{:>24}{:>32}\n", "boxes like " + names_.front(), "seconds of a token",
            "busiest / mean, of a call");
        add("  {:<20}{:>12}{:>12}{:>16}{:>16}\n", "", "1 replica", "2 replicas", "1 replica",
            "2 replicas");
        for (const std::uint32_t n : kBoxCounts) {
            if (n > command_.boxes) break;
            std::string seconds;
            std::string imbalance;
            for (const std::uint32_t replicas : {1U, 2U}) {
                if (replicas > n) continue;
                SimulationOptions equal = options;
                experts::PlacementRequest request;
                request.weights.assign(n, 1);
                request.replicas = replicas;
                ASSIGN_OR_RETURN(std::vector<model::Placement> placed,
                                 experts::place_experts(request, model_.config));
                equal.boxes.assign(n, options.boxes.front());
                for (std::uint32_t b = 0; b < n; ++b) {
                    equal.boxes[b].held = std::move(placed[b]);
                    equal.boxes[b].weight = 1;
                }
                ASSIGN_OR_RETURN(const Simulation found,
                                 experts::simulate(equal, trace_, model_.config));
                fmt::format_to(std::back_inserter(seconds), "{:>12.3f}", token_seconds(found));
                fmt::format_to(std::back_inserter(imbalance), "{:>16.3f}", found.imbalance);
            }
            add("  {:<20}{:<24}{}\n", n, seconds, imbalance);
        }
        return Status::ok();
    }

    const PlanCommand& command_;
    const PipelinePlan& plan_;
    const model::Model& model_;
    const PipelineMemory& memory_;
    const SimulatedSpeeds& speeds_;
    struct TrunkLink {
        std::string name;
        std::uint64_t bytes_to = 0;  // of a row
        std::uint64_t bytes_from = 0;
        double round_trip_s = 0;  // 0: on the gateway's box
        double row_s = 0;
    };
    const experts::RoutingTrace& trace_;
    std::vector<std::string> names_;
    std::vector<TrunkLink> trunk_links_;
    double trunk_s_ = 0;
    std::string text_;
};

}  // namespace

bool needs_disk_rate(const PipelinePlan& plan) {
    return std::any_of(plan.stages.begin(), plan.stages.end(), [](const StagePlan& stage) {
        return stage.kind == ServiceKind::experts && stage.box.disk_rate == 0;
    });
}

Result<std::string> simulation_tables(const PlanCommand& command, const PipelinePlan& plan,
                                      const model::Model& model, const PipelineMemory& memory,
                                      const SimulatedSpeeds& speeds,
                                      const experts::RoutingTrace& trace) {
    return BoxSimulator(command, plan, model, memory, speeds, trace).run();
}

}  // namespace k3::launcher
