#pragma once
// Replays a recorded routing through a policy: how often would an expert have been in RAM?

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <vector>

#include "common/base/result.h"
#include "common/experts/eviction_policy.h"

namespace k3::experts {

struct RoutingTrace {
    struct Visit {
        std::uint32_t position = 0;
        std::uint32_t layer = 0;
        std::vector<ExpertUse> uses;  // in order of rank
    };
    std::vector<Visit> visits;  // in the order of the requests

    std::size_t n_requests() const noexcept;
    std::uint32_t n_positions() const noexcept;  // different ones
    /// Sizes that hold every layer and expert that occurs.
    EvictionPolicy::Shape shape(std::size_t capacity) const noexcept;
};

/// A CSV file with a line of names, then position, layer and the experts in order of rank, any
/// number of them. `12:3` is expert 12 with rank 3; without one the rank is the place, from 0.
/// Errors: not_found, io, corrupt (naming file and line).
Result<RoutingTrace> read_trace(const std::filesystem::path& path);

struct ReplayCounts {
    std::size_t hits = 0;
    std::size_t refused = 0;  // admissions
    std::size_t evictions = 0;
};

/// Cold start, first uses counted: the policy's own hits.
ReplayCounts replay(const RoutingTrace& trace, EvictionPolicy& policy);

/// The most hits any policy could have had that knows the future: keeps the experts whose next use
/// is nearest (Belady's rule, not keeping at all allowed).
std::size_t best_possible_hits(const RoutingTrace& trace, std::size_t capacity);

}  // namespace k3::experts
