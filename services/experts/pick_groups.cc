#include "services/experts/pick_groups.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>

#include "common/base/check.h"

namespace k3::experts {

namespace {

Error invalid(std::uint32_t layer, const std::string& what) {
    return Error{ErrorCode::invalid_argument, fmt::format("layer {}: {}", layer, what),
                 "check the caller: a trunk of the same version sends no such call"};
}

}  // namespace

PickGroups::PickGroups(const Limits& limits, const model::Placement& held, std::string server)
    : limits_(limits),
      held_(held),
      server_(std::move(server)),
      first_of_(std::size_t{limits.n_experts} + 1),
      row_picks_(limits.max_rows),
      last_expert_(limits.max_rows) {
    uses_.reserve(limits.n_experts);
    order_.reserve(std::size_t{limits.max_rows} * limits.top_k);
}

std::span<const std::uint32_t> PickGroups::picks_of(std::size_t i) const noexcept {
    const std::uint32_t expert = uses_[i].expert;
    return std::span(order_).subspan(first_of_[expert], first_of_[expert + 1] - first_of_[expert]);
}

Status PickGroups::group(std::uint32_t layer, std::size_t n_rows,
                         std::span<const msg::Pick> picks) {
    K3_CHECK(n_rows <= limits_.max_rows, fmt::format("{} rows", n_rows));
    std::fill_n(row_picks_.begin(), n_rows, 0U);
    for (std::size_t i = 0; i < picks.size(); ++i)
        RETURN_IF_ERROR(check_pick(layer, n_rows, i, picks[i]));
    sort_by_expert(picks);
    std::fill_n(last_expert_.begin(), n_rows, 0U);
    return check_twice(layer, picks);
}

Status PickGroups::check_pick(std::uint32_t layer, std::size_t n_rows, std::size_t index,
                              const msg::Pick& pick) {
    if (pick.row >= n_rows)
        return invalid(layer, fmt::format("pick {} is for row {}, and the call has {} rows", index,
                                          pick.row, n_rows));
    if (pick.expert >= limits_.n_experts)
        return invalid(layer, fmt::format("pick {} is of expert {}, and a layer has experts 0 to "
                                          "{}",
                                          index, pick.expert, limits_.n_experts - 1));
    RETURN_IF_ERROR(check_held(layer, pick.expert));
    if (!std::isfinite(pick.weight))
        return invalid(layer, fmt::format("row {} expert {}: the weight is not finite", pick.row,
                                          pick.expert));
    // More terms than that could also exceed the 64 bits of a sum.
    if (++row_picks_[pick.row] > limits_.top_k)
        return invalid(layer,
                       fmt::format("row {} has more than {} picks", pick.row, limits_.top_k));
    return Status::ok();
}

Status PickGroups::check_held(std::uint32_t layer, std::uint32_t expert) const {
    if (held_.holds(layer, expert)) return Status::ok();
    return Error{ErrorCode::not_found,
                 fmt::format("{} does not hold layer {} expert {}", server_, layer, expert),
                 "check the shares of the expert servers: together they must hold every expert"};
}

void PickGroups::sort_by_expert(std::span<const msg::Pick> picks) {
    uses_.clear();
    std::fill(first_of_.begin(), first_of_.end(), 0U);
    for (const msg::Pick& pick : picks) ++first_of_[pick.expert + 1];
    for (std::uint32_t expert = 0; expert < limits_.n_experts; ++expert) {
        if (first_of_[expert + 1] > 0)
            uses_.push_back({expert, std::numeric_limits<std::uint32_t>::max()});
        first_of_[expert + 1] += first_of_[expert];
    }
    order_.resize(picks.size());
    for (std::uint32_t i = 0; i < picks.size(); ++i) order_[first_of_[picks[i].expert]++] = i;
    // Each begin has moved to its end, which is the next one's begin.
    for (std::uint32_t expert = limits_.n_experts; expert > 0; --expert)
        first_of_[expert] = first_of_[expert - 1];
    first_of_[0] = 0;
    for (std::size_t i = 0; i < uses_.size(); ++i)
        for (std::uint32_t index : picks_of(i))
            uses_[i].rank = std::min(uses_[i].rank, picks[index].rank);
    std::sort(uses_.begin(), uses_.end(), [](const ExpertUse& a, const ExpertUse& b) {
        return std::pair(a.rank, a.expert) < std::pair(b.rank, b.expert);
    });
}

Status PickGroups::check_twice(std::uint32_t layer, std::span<const msg::Pick> picks) {
    for (std::uint32_t index : order_) {
        const msg::Pick& pick = picks[index];
        if (std::exchange(last_expert_[pick.row], pick.expert + 1) == pick.expert + 1)
            return invalid(layer,
                           fmt::format("row {} picks expert {} twice", pick.row, pick.expert));
    }
    return Status::ok();
}

}  // namespace k3::experts
