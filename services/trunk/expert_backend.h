#pragma once
// What the trunk wants from whoever holds the routed experts.
//
// Split in three so that disks and other boxes start early: a hint when the router has spoken, the
// call when the latent rows are ready, and the sums when the shared experts have been computed
// meanwhile. The sums are 64-bit fixed point (design, section 5): partial sums of any grouping add
// up to the same bits.

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

#include "common/base/result.h"

namespace k3::trunk {

/// The router's choices for the rows of a step: row r has picks [r * top_k, (r + 1) * top_k), the
/// place within being the rank.
struct Routing {
    std::uint32_t layer = 0;
    std::size_t n_rows = 0;
    std::size_t top_k = 0;
    const std::uint32_t* ids = nullptr;
    const float* weights = nullptr;
};

/// One thread calls, in the order prefetch, start, finish; `routing` and `latent` stay valid and
/// unchanged until finish returns.
class ExpertBackend {
  public:
    virtual ~ExpertBackend() = default;

    /// A hint: nothing depends on it.
    virtual void prefetch(const Routing& routing) noexcept = 0;
    /// Begins the work on latent rows [n_rows, latent_size].
    virtual Status start(const Routing& routing, std::span<const float> latent) = 0;
    /// Waits and writes the sum of all picks of each row, [n_rows, latent_size], scaled by 2^40.
    /// After an error (of start as well) nothing is outstanding.
    virtual Status finish(std::span<std::int64_t> sums) = 0;
    /// Which service the last error came from; empty: this process.
    virtual std::string failed_service() const { return {}; }
};

}  // namespace k3::trunk
