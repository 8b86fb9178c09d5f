#pragma once
// How long the experts of a step take on some boxes, from a recorded routing.
//
// Replays a trace call by call through what really decides: the placement, the choice among
// replicas, and the policy of every server's memory. Time is a model of four figures for each box:
//
//   box    max(missed experts / disk rate + one expert / memory rate, used experts / memory rate)
//          + round trip + (rows out and sums back) / link rate
//   layer  the slowest box, or all rows and sums through the trunk's own link if that takes longer
//
// A server computes the experts that it has while the disk reads the others, hence the maximum; the
// last one read is still to be computed. Memories are empty at the start of the trace, except where
// one has room for all that its server holds. bench/spread compares times with measurements.

#include <cstdint>
#include <string>
#include <vector>

#include "common/base/result.h"
#include "common/experts/trace_replay.h"
#include "common/model/config.h"
#include "common/model/placement.h"

namespace k3::experts {

/// An expert server and what it runs on. Rates in bytes per second, above 0.
struct SimulatedBox {
    model::Placement held;
    std::uint32_t weight = 1;       // as it announces
    std::uint64_t cache_slots = 0;  // experts that its memory keeps
    double disk_rate = 0;
    double memory_rate = 0;  // weights that are computed with
    double link_rate = 0;    // to the trunk, each way; 0: not limited, as on the same box
    double round_trip_s = 0;
};

/// How a holder is chosen: as the trunk does, or, for comparison, always the preferred one or one
/// after the other (the least load, and no regard for what is in memory where).
enum class HolderChoice { spread, preferred, in_turn };

struct SimulationOptions {
    std::vector<SimulatedBox> boxes;
    std::string policy = "rank-weighted";
    std::uint32_t rows_per_step = 1;  // consecutive positions of the trace that share a step
    double trunk_link_rate = 0;       // all boxes together; 0: not limited
    HolderChoice choice = HolderChoice::spread;
};

/// Sums over all steps.
struct BoxLoad {
    std::uint64_t used = 0;  // experts, once for each call
    std::uint64_t hits = 0;  // of these, in memory
    std::uint64_t read_bytes = 0;
    std::uint64_t link_bytes = 0;  // both ways
    double busy_s = 0;             // reading or computing
};

struct Simulation {
    std::uint32_t n_steps = 0;
    std::uint64_t n_rows = 0;
    double expert_s = 0;   // of all steps: the sum of their layers
    double imbalance = 0;  // mean over calls of: experts per weight, largest of a box / mean
    std::vector<BoxLoad> boxes;
};

/// Errors: invalid_argument (no box or too many, a rate that is not above 0, an empty trace or one
/// of experts that no box holds, an unknown policy).
Result<Simulation> simulate(const SimulationOptions& options, const RoutingTrace& trace,
                            const model::ModelConfig& config);

}  // namespace k3::experts
