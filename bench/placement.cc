// placement: how evenly a recorded routing falls on several expert servers, by placement and choice
// among replicas, and what that does to the hits of their memories.
//
//     build/bench/placement --trace tests/golden/routing-trace/decode_order.csv --cache-bytes 32GB
//
// Nothing is read or started: the trace is replayed through the placements, the choice among
// replicas, and the cache policy of each server. `imbalance` is the mean over calls of the experts
// of the busiest server divided by the mean of all; `reads` are what the busiest server of each
// call reads from disk, summed, as a part of what one server with all the memory reads: a layer
// waits for it.

#include <fmt/format.h>

#include <string>
#include <vector>

#include "bench/machine.h"
#include "bench/settings_main.h"
#include "common/base/deadline.h"
#include "common/base/settings.h"
#include "common/experts/placement_plan.h"
#include "common/experts/replica_choice.h"
#include "common/experts/simulation.h"
#include "common/model/memory_plan.h"
#include "common/model/synthetic_config.h"
#include "common/model/tensor_names.h"

namespace {

using namespace k3;
using experts::HolderChoice;
using experts::PlacementRequest;
using experts::RoutingTrace;
using Placements = std::vector<model::Placement>;

struct PlacementBench {
    std::string trace = "tests/golden/routing-trace/decode_order.csv";
    std::uint64_t cache_bytes = 32'000'000'000;  // of all servers together
    std::int64_t learn = 8;                      // positions of the trace
};

Result<Settings::Action> read_settings(int argc, const char* const* argv, PlacementBench& out) {
    Settings settings("placement", "Replays a recorded routing over several expert servers.");
    settings.add_text("trace", &out.trace, "CSV file: position, layer, experts in order of rank");
    settings.add_bytes("cache_bytes", &out.cache_bytes, "memory of all servers together");
    settings.add_integer("learn", &out.learn, 1, 1'000'000,
                         "positions that a placement learns from, where others are measured");
    return settings.parse(argc, argv);
}

Placements hashed(std::size_t n_servers, const model::ModelConfig& config) {
    Placements placements(n_servers, model::Placement(config.n_layers, config.moe.n_experts));
    for (std::uint32_t layer = config.first_k_dense; layer < config.n_layers; ++layer)
        for (std::uint32_t expert = 0; expert < config.moe.n_experts; ++expert) {
            std::uint64_t hash = (std::uint64_t{layer} << 32U | expert) * 0x9E3779B97F4A7C15U;
            hash = (hash ^ hash >> 29U) * 0xBF58476D1CE4E5B9U;
            placements[(hash >> 32U) % n_servers].add(layer, expert);
        }
    return placements;
}

Result<Placements> placed(std::size_t n_servers, std::uint32_t replicas, const RoutingTrace* trace,
                          const model::ModelConfig& config, double replicated = 1) {
    PlacementRequest request;
    request.weights.assign(n_servers, 1);
    request.replicas = replicas;
    request.replicated = replicated;
    request.trace = trace;
    return experts::place_experts(request, config);
}

/// Steps of `n_rows` rows. A trace of fewer positions goes on with the rows of other layers: to the
/// experts of a layer they are rows of somebody else.
RoutingTrace widened(const RoutingTrace& trace, std::uint32_t n_rows,
                     const model::ModelConfig& config) {
    RoutingTrace wide = trace;
    const std::uint32_t n_positions = trace.n_positions();
    const std::uint32_t n_layers = config.n_layers - config.first_k_dense;
    for (std::uint32_t row = n_positions; row < n_rows; ++row)
        for (const RoutingTrace::Visit& visit : trace.visits) {
            if (visit.position != row % n_positions) continue;
            RoutingTrace::Visit other = visit;
            other.position = row;
            other.layer = config.first_k_dense +
                          (visit.layer - config.first_k_dense + row / n_positions) % n_layers;
            wide.visits.push_back(other);
        }
    return wide;
}

struct Line {
    std::string placement;
    std::string choice;
    Placements placements;
    HolderChoice rule = HolderChoice::spread;
    const RoutingTrace* trace;
};

Result<experts::Simulation> replay(const Line& line, std::uint32_t n_rows, std::uint64_t slots,
                                   const model::ModelConfig& config) {
    experts::SimulationOptions options;
    for (const model::Placement& held : line.placements) {
        experts::SimulatedBox box;
        box.held = held;
        box.cache_slots = slots / line.placements.size();
        // Reads only, an expert a second: the times are counts.
        box.disk_rate = static_cast<double>(model::expert_bytes(config));
        box.memory_rate = 1e30;
        options.boxes.push_back(box);
    }
    options.rows_per_step = n_rows;
    options.choice = line.rule;
    return experts::simulate(options, widened(*line.trace, n_rows, config), config);
}

/// What choosing alone takes for a call, in microseconds.
double choice_us(const RoutingTrace& trace, const Placements& placements, std::size_t n_experts) {
    const std::vector<std::uint32_t> weights(placements.size(), 1);
    experts::ReplicaChoice choice(n_experts);
    std::vector<std::vector<experts::ReplicaChoice::Item>> calls;
    for (const RoutingTrace::Visit& visit : trace.visits) {
        auto& items = calls.emplace_back();
        for (const experts::ExpertUse& use : visit.uses) {
            std::uint64_t holders = 0;
            for (std::size_t s = 0; s < placements.size(); ++s)
                if (placements[s].holds(visit.layer, use.expert)) holders |= std::uint64_t{1} << s;
            items.push_back({holders, static_cast<std::uint8_t>(experts::preferred_holder(
                                          visit.layer, use.expert, holders, weights))});
        }
    }
    const Clock::time_point start = Clock::now();
    for (auto& items : calls) choice.spread(items, weights);
    const std::chrono::duration<double, std::micro> taken = Clock::now() - start;
    return taken.count() / static_cast<double>(calls.size());
}

/// All experts of a layer at once: what a step of some hundred rows asks for.
RoutingTrace full_layers(const model::ModelConfig& config) {
    RoutingTrace trace;
    for (std::uint32_t layer = config.first_k_dense; layer < config.n_layers; ++layer) {
        RoutingTrace::Visit visit{0, layer, {}};
        for (std::uint32_t e = 0; e < config.moe.n_experts; ++e) visit.uses.push_back({e, 0});
        trace.visits.push_back(std::move(visit));
    }
    return trace;
}

Result<std::vector<Line>> lines_for(std::size_t n, const RoutingTrace& trace,
                                    const RoutingTrace& learned, const RoutingTrace& unseen,
                                    const model::ModelConfig& config) {
    std::vector<Line> lines;
    lines.push_back({"hash", "-", hashed(n, config), HolderChoice::spread, &trace});
    ASSIGN_OR_RETURN(Placements stripes, placed(n, 1, nullptr, config));
    lines.push_back({"stripes", "-", stripes, HolderChoice::spread, &trace});
    ASSIGN_OR_RETURN(Placements co_active, placed(n, 1, &trace, config));
    lines.push_back({"co-active", "-", co_active, HolderChoice::spread, &trace});
    ASSIGN_OR_RETURN(Placements half, placed(n, 1, &learned, config));
    lines.push_back({"co-active, other positions", "-", half, HolderChoice::spread, &unseen});
    lines.push_back({"stripes, other positions", "-", stripes, HolderChoice::spread, &unseen});
    ASSIGN_OR_RETURN(Placements hot, placed(n, 2, &learned, config, 0.125));
    lines.push_back({"1/8 twice, other positions", "ours", hot, HolderChoice::spread, &unseen});
    ASSIGN_OR_RETURN(Placements twice, placed(n, 2, nullptr, config));
    lines.push_back({"2 replicas", "preferred", twice, HolderChoice::preferred, &trace});
    lines.push_back({"2 replicas", "in turn", twice, HolderChoice::in_turn, &trace});
    lines.push_back({"2 replicas", "ours", twice, HolderChoice::spread, &trace});
    return lines;
}

Status run(const PlacementBench& settings) {
    ASSIGN_OR_RETURN(
        const model::ModelConfig config,
        model::parse_config(model::synthetic_config_json(93, 896, 163840), "released dimensions"));
    ASSIGN_OR_RETURN(const RoutingTrace trace, experts::read_trace(settings.trace));
    RoutingTrace learned;
    RoutingTrace unseen;
    for (const RoutingTrace::Visit& visit : trace.visits)
        (visit.position < settings.learn ? learned : unseen).visits.push_back(visit);
    const std::uint64_t slots =
        settings.cache_bytes / model::expert_slot_bytes(model::expert_bytes(config));
    fmt::print("# machine: {}\n", bench::cpu_model());
    fmt::print("# trace: {}: {} positions; memory for {} experts on all servers together\n",
               settings.trace, trace.n_positions(), slots);
    fmt::print("rows,servers,placement,choice,imbalance,hit_percent,reads\n");
    for (const std::uint32_t n_rows : {1U, 16U}) {
        ASSIGN_OR_RETURN(Placements all, placed(1, 1, nullptr, config));
        const Line one{"all", "-", all, HolderChoice::spread, &trace};
        ASSIGN_OR_RETURN(const experts::Simulation alone, replay(one, n_rows, slots, config));
        for (const std::size_t n : {2U, 4U, 8U}) {
            ASSIGN_OR_RETURN(const std::vector<Line> lines,
                             lines_for(n, trace, learned, unseen, config));
            for (const Line& line : lines) {
                if (line.trace == &unseen && unseen.visits.empty()) continue;
                ASSIGN_OR_RETURN(const experts::Simulation found,
                                 replay(line, n_rows, slots, config));
                std::uint64_t used = 0;
                std::uint64_t hits = 0;
                for (const experts::BoxLoad& box : found.boxes) {
                    used += box.used;
                    hits += box.hits;
                }
                fmt::print(
                    "{},{},{},{},{:.3f},{:.2f},{}\n", n_rows, n, line.placement, line.choice,
                    found.imbalance, 100.0 * static_cast<double>(hits) / static_cast<double>(used),
                    line.trace == &trace ? fmt::format("{:.3f}", found.expert_s / alone.expert_s)
                                         : "");
            }
        }
    }
    for (const std::size_t n : {2U, 4U, 8U}) {
        ASSIGN_OR_RETURN(const Placements twice, placed(n, 2, nullptr, config));
        fmt::print(
            "# choosing on {} servers with 2 replicas: {:.2f} us for 16 picks, {:.1f} us for "
            "all {} experts of a layer\n",
            n, choice_us(trace, twice, config.moe.n_experts),
            choice_us(full_layers(config), twice, config.moe.n_experts), config.moe.n_experts);
    }
    return Status::ok();
}

}  // namespace

int main(int argc, char** argv) {
    return bench::settings_main<PlacementBench>(argc, argv, read_settings, run);
}
