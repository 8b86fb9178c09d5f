#pragma once
// The picks of one call, checked and sorted by expert, so that each expert's weights are read and
// decoded once for all the rows that use it.

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "common/base/result.h"
#include "common/experts/eviction_policy.h"
#include "common/model/placement.h"
#include "common/transport/messages/experts.h"

namespace k3::experts {

class PickGroups {
  public:
    struct Limits {
        std::uint32_t n_experts = 0;  // of a layer
        std::uint32_t top_k = 0;      // picks of a row
        std::uint32_t max_rows = 0;   // of a call
    };
    /// Takes all its memory here. `held` is borrowed, `server` appears in errors.
    PickGroups(const Limits& limits, const model::Placement& held, std::string server);

    /// Replaces the groups by those of this call; n_rows is at most max_rows.
    /// Errors: invalid_argument (a row or expert that does not exist, a weight that is not finite,
    /// an expert picked twice for a row, more picks for a row than the router gives), not_found (an
    /// expert that this server does not hold). All name the layer and what is wrong.
    Status group(std::uint32_t layer, std::size_t n_rows, std::span<const msg::Pick> picks);

    /// The experts picked, each once, with the best rank over the rows, in order of that rank.
    std::span<const ExpertUse> uses() const noexcept { return uses_; }
    /// Indices of the picks of uses()[i], in the order of the call.
    std::span<const std::uint32_t> picks_of(std::size_t i) const noexcept;

    /// not_found for an expert that this server does not hold, naming both.
    Status check_held(std::uint32_t layer, std::uint32_t expert) const;

  private:
    Status check_pick(std::uint32_t layer, std::size_t n_rows, std::size_t index,
                      const msg::Pick& pick);
    void sort_by_expert(std::span<const msg::Pick> picks);
    Status check_twice(std::uint32_t layer, std::span<const msg::Pick> picks);

    const Limits limits_;
    const model::Placement& held_;
    const std::string server_;
    std::vector<ExpertUse> uses_;
    std::vector<std::uint32_t> order_;        // [n_picks], sorted by expert
    std::vector<std::uint32_t> first_of_;     // [n_experts + 1], into order_
    std::vector<std::uint32_t> row_picks_;    // [max_rows], picks of the row
    std::vector<std::uint32_t> last_expert_;  // [max_rows], the last one seen for the row, plus 1
};

}  // namespace k3::experts
