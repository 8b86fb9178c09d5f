#include "common/experts/simulation.h"

#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <map>
#include <memory>
#include <set>
#include <utility>

#include "common/experts/replica_choice.h"
#include "common/model/tensor_names.h"

namespace k3::experts {

namespace {

using Visit = RoutingTrace::Visit;

/// The rows of one layer in one step.
using CallRows = std::vector<const Visit*>;

/// In the order of the steps, the layers of each in order.
std::vector<CallRows> calls_of(const RoutingTrace& trace, std::uint32_t rows_per_step) {
    std::set<std::uint32_t> positions;
    for (const Visit& visit : trace.visits) positions.insert(visit.position);
    std::map<std::uint32_t, std::uint32_t> step_of;
    for (std::uint32_t position : positions)
        step_of.emplace(position, static_cast<std::uint32_t>(step_of.size()) / rows_per_step);
    std::map<std::pair<std::uint32_t, std::uint32_t>, CallRows> calls;
    for (const Visit& visit : trace.visits)
        calls[{step_of[visit.position], visit.layer}].push_back(&visit);
    std::vector<CallRows> in_order;
    for (auto& [key, rows] : calls) in_order.push_back(std::move(rows));
    return in_order;
}

class Simulator {
  public:
    Simulator(const SimulationOptions& options, const model::ModelConfig& config)
        : options_(options),
          config_(config),
          expert_bytes_(static_cast<double>(model::expert_bytes(config))),
          choice_(config.moe.n_experts) {
        for (const SimulatedBox& box : options.boxes) weights_.push_back(box.weight);
        out_.boxes.resize(options.boxes.size());
    }

    Status make_policies() {
        for (const SimulatedBox& box : options_.boxes) {
            ASSIGN_OR_RETURN(auto policy,
                             make_policy(options_.policy, {config_.n_layers, config_.moe.n_experts,
                                                           box.cache_slots}));
            policies_.push_back(std::move(policy));
            holds_all_.push_back(box.cache_slots >= box.held.count());
        }
        return Status::ok();
    }

    Status call(const CallRows& rows) {
        const std::uint32_t layer = rows.front()->layer;
        RETURN_IF_ERROR(spread(layer, rows));
        double slowest_s = 0;
        double link_bytes = 0;
        for (std::size_t b = 0; b < options_.boxes.size(); ++b) {
            if (uses_[b].empty()) continue;
            const SimulatedBox& box = options_.boxes[b];
            const double bytes = static_cast<double>(count_rows(b, rows)) * row_bytes();
            out_.boxes[b].link_bytes += static_cast<std::uint64_t>(bytes);
            link_bytes += bytes;
            const double link_s =
                box.round_trip_s + (box.link_rate > 0 ? bytes / box.link_rate : 0);
            slowest_s = std::max(slowest_s, use(b, layer) + link_s);
        }
        if (options_.trunk_link_rate > 0)
            slowest_s = std::max(slowest_s, link_bytes / options_.trunk_link_rate);
        out_.expert_s += slowest_s;
        count_imbalance();
        return Status::ok();
    }

    Simulation take() {
        out_.imbalance /= n_calls_;
        return std::move(out_);
    }

  private:
    /// f32 out, 64-bit sums back.
    double row_bytes() const {
        return static_cast<double>(config_.moe.latent_size) *
               (sizeof(float) + sizeof(std::int64_t));
    }

    /// uses_: what each box computes, by rank.
    Status spread(std::uint32_t layer, const CallRows& rows) {
        std::map<std::uint32_t, std::uint32_t> best_rank;
        for (const Visit* row : rows)
            for (const ExpertUse& use : row->uses) {
                const auto [at, is_new] = best_rank.try_emplace(use.expert, use.rank);
                if (!is_new) at->second = std::min(at->second, use.rank);
            }
        called_.clear();
        for (const auto& [expert, rank] : best_rank) called_.push_back({expert, rank});
        std::stable_sort(called_.begin(), called_.end(),
                         [](const ExpertUse& a, const ExpertUse& b) { return a.rank < b.rank; });
        items_.clear();
        for (const ExpertUse& use : called_) {
            std::uint64_t holders = 0;
            for (std::size_t b = 0; b < options_.boxes.size(); ++b)
                if (options_.boxes[b].held.holds(layer, use.expert))
                    holders |= std::uint64_t{1} << b;
            if (holders == 0)
                return Error{ErrorCode::invalid_argument,
                             fmt::format("the trace uses expert {} of layer {}, which no box holds",
                                         use.expert, layer),
                             "give a trace of this model, and boxes that hold all of its experts"};
            const std::uint32_t turn = options_.choice == HolderChoice::in_turn ? n_calls_ : 0;
            const std::size_t home = preferred_holder(layer + turn, use.expert, holders, weights_);
            items_.push_back({holders, static_cast<std::uint8_t>(home)});
        }
        ++n_calls_;
        if (options_.choice != HolderChoice::preferred) choice_.spread(items_, weights_);
        uses_.assign(options_.boxes.size(), {});
        for (std::size_t i = 0; i < items_.size(); ++i)
            uses_[items_[i].server].push_back(called_[i]);
        return Status::ok();
    }

    std::size_t count_rows(std::size_t box, const CallRows& rows) const {
        return static_cast<std::size_t>(
            std::count_if(rows.begin(), rows.end(), [&](const Visit* row) {
                return std::any_of(row->uses.begin(), row->uses.end(), [&](const ExpertUse& use) {
                    return std::any_of(
                        uses_[box].begin(), uses_[box].end(),
                        [&](const ExpertUse& own) { return own.expert == use.expert; });
                });
            }));
    }

    /// Seconds that the box takes.
    double use(std::size_t box, std::uint32_t layer) {
        EvictionPolicy& policy = *policies_[box];
        policy.visit(layer, uses_[box]);
        std::vector<ExpertKey> missed;
        for (const ExpertUse& one : uses_[box])
            if (!holds_all_[box] && !policy.keeps({layer, one.expert}))
                missed.push_back({layer, one.expert});
        for (ExpertKey key : missed) policy.admit(key);

        const SimulatedBox& figures = options_.boxes[box];
        const double n_used = static_cast<double>(uses_[box].size());
        const double n_read = static_cast<double>(missed.size());
        double busy_s = n_used * expert_bytes_ / figures.memory_rate;
        if (!missed.empty())
            busy_s = std::max(busy_s, n_read * expert_bytes_ / figures.disk_rate +
                                          expert_bytes_ / figures.memory_rate);
        BoxLoad& load = out_.boxes[box];
        load.used += uses_[box].size();
        load.hits += uses_[box].size() - missed.size();
        load.read_bytes += static_cast<std::uint64_t>(n_read * expert_bytes_);
        load.busy_s += busy_s;
        return busy_s;
    }

    void count_imbalance() {
        double most = 0;
        double weight = 0;
        for (std::size_t b = 0; b < weights_.size(); ++b) {
            most = std::max(most, static_cast<double>(uses_[b].size()) / weights_[b]);
            weight += weights_[b];
        }
        out_.imbalance += most * weight / static_cast<double>(called_.size());
    }

    const SimulationOptions& options_;
    const model::ModelConfig& config_;
    const double expert_bytes_;
    std::vector<std::uint32_t> weights_;
    std::vector<std::unique_ptr<EvictionPolicy>> policies_;
    std::vector<bool> holds_all_;  // in memory
    ReplicaChoice choice_;
    std::vector<ExpertUse> called_;
    std::vector<ReplicaChoice::Item> items_;
    std::vector<std::vector<ExpertUse>> uses_;
    std::uint32_t n_calls_ = 0;
    Simulation out_;
};

Status check(const SimulationOptions& options, const RoutingTrace& trace) {
    if (options.boxes.empty() || options.boxes.size() > kMaxServers)
        return Error{ErrorCode::invalid_argument,
                     fmt::format("{} boxes to simulate", options.boxes.size()),
                     fmt::format("give 1 to {}", kMaxServers)};
    for (const SimulatedBox& box : options.boxes)
        if (!(box.disk_rate > 0 && box.memory_rate > 0))
            return Error{ErrorCode::invalid_argument,
                         fmt::format("a box that reads {} bytes per second from disk and {} from "
                                     "memory",
                                     box.disk_rate, box.memory_rate),
                         "give both rates, in bytes per second"};
    const bool is_empty = std::all_of(trace.visits.begin(), trace.visits.end(),
                                      [](const Visit& visit) { return visit.uses.empty(); });
    if (is_empty || options.rows_per_step == 0)
        return Error{ErrorCode::invalid_argument, "a simulation of no picks",
                     "give a trace with visits, and at least one row for each step"};
    return Status::ok();
}

}  // namespace

Result<Simulation> simulate(const SimulationOptions& options, const RoutingTrace& trace,
                            const model::ModelConfig& config) {
    RETURN_IF_ERROR(check(options, trace));
    Simulator simulator(options, config);
    RETURN_IF_ERROR(simulator.make_policies());
    for (const CallRows& rows : calls_of(trace, options.rows_per_step)) {
        const bool has_picks = std::any_of(rows.begin(), rows.end(),
                                           [](const Visit* row) { return !row->uses.empty(); });
        if (!has_picks) continue;
        RETURN_IF_ERROR(simulator.call(rows));
    }
    Simulation out = simulator.take();
    const std::uint32_t n_positions = trace.n_positions();
    out.n_rows = n_positions;
    out.n_steps = (n_positions + options.rows_per_step - 1) / options.rows_per_step;
    return out;
}

}  // namespace k3::experts
