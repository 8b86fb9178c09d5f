#pragma once
// Which server holds which experts: made from weights, replicas and a recorded routing.
//
// Every layer is dealt out for itself, so that a call finds its experts on all servers: each server
// gets a part of the layer's experts in proportion to its weight, and remainders are carried into
// the next layer. With equal weights and no trace, first holders are those of the default stripes.
// With a trace, experts that were often picked together go to different servers, and only the
// experts that were used most may have replicas.
//
// The same request gives the same placement on every machine.

#include <cstdint>
#include <string>
#include <vector>

#include "common/base/result.h"
#include "common/experts/trace_replay.h"
#include "common/model/config.h"
#include "common/model/placement.h"

namespace k3::experts {

struct PlacementRequest {
    std::vector<std::uint32_t> weights;  // of each server, at least 1
    std::uint32_t replicas = 1;          // servers that hold an expert
    double replicated = 1;  // part of each layer's experts that have replicas, those used most
    const RoutingTrace* trace = nullptr;
};

/// What each server holds, in the order of the weights. Every expert has a holder.
/// Errors: invalid_argument (no server or more than 64; more replicas than servers; a part that is
/// not from 0 to 1, or below 1 without a trace; a trace with layers or experts that the model does
/// not have).
Result<std::vector<model::Placement>> place_experts(const PlacementRequest& request,
                                                    const model::ModelConfig& config);

}  // namespace k3::experts
