#pragma once
// Which rows the next step computes.
//
// A request is always the same thing to the trunk: a session, and ids it has not been fed yet.
// One id left means it is generating, several mean its prompt is still being read. Requests that
// generate go first, one row each, so that a long prompt delays nobody by more than its chunk;
// prompts share the rows that are left. What a step is made of changes no bit of any result.

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "common/transport/messages/trunk.h"

namespace k3::gateway {

/// What one request needs.
struct Need {
    std::uint64_t session = 0;
    std::uint64_t position = 0;          // of the first of `ids`: the session's next
    std::span<const std::uint32_t> ids;  // not fed yet; none: the request has no part in the step
    std::size_t n_prompt_left = 0;       // how many of `ids`, from the front, belong to the prompt
    bool want_all = false;               // logits of every prompt row, not only of the last row
};

/// What one request gets.
struct Share {
    std::size_t request = 0;  // index into the needs
    std::size_t n_rows = 0;   // of this step
    std::size_t first_want = 0;
    std::size_t n_want = 0;  // rows of the logits, in order of position
    bool complete = false;   // nothing is left after this step: its last want row is sampled
};

struct StepPlan {
    std::vector<msg::StepRow> rows;
    std::vector<std::uint32_t> want;
    std::vector<Share> shares;
};

struct StepLimits {
    std::size_t max_rows = 0;       // of the step
    std::size_t prefill_chunk = 0;  // of one prompt
    std::size_t max_want = 0;       // rows of one prompt whose logits are all wanted
};

/// `turn` rotates who comes first, so that nobody starves when rows are short.
StepPlan plan_step(std::span<const Need> needs, const StepLimits& limits, std::size_t turn);

}  // namespace k3::gateway
