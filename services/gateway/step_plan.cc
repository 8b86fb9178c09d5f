#include "services/gateway/step_plan.h"

#include <algorithm>

namespace k3::gateway {

namespace {

void add_share(StepPlan& plan, std::size_t request, const Need& need, std::size_t n_rows) {
    Share share;
    share.request = request;
    share.n_rows = n_rows;
    share.first_want = plan.want.size();
    share.complete = n_rows == need.ids.size();
    for (std::size_t i = 0; i < n_rows; ++i) {
        const bool last = i + 1 == need.ids.size();
        if (last || (need.want_all && i < need.n_prompt_left))
            plan.want.push_back(static_cast<std::uint32_t>(plan.rows.size()));
        plan.rows.push_back({need.session, need.position + i, need.ids[i]});
    }
    share.n_want = plan.want.size() - share.first_want;
    plan.shares.push_back(share);
}

}  // namespace

StepPlan plan_step(std::span<const Need> needs, const StepLimits& limits, std::size_t turn) {
    StepPlan plan;
    for (const bool prefill : {false, true}) {
        for (std::size_t i = 0; i < needs.size(); ++i) {
            const std::size_t request = (i + turn) % needs.size();
            const Need& need = needs[request];
            if ((need.ids.size() > 1) != prefill) continue;
            std::size_t n_rows = std::min(
                {need.ids.size(), limits.prefill_chunk, limits.max_rows - plan.rows.size()});
            if (need.want_all) n_rows = std::min(n_rows, limits.max_want);
            if (n_rows > 0) add_share(plan, request, need, n_rows);
        }
    }
    return plan;
}

}  // namespace k3::gateway
