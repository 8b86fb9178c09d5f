#pragma once
// What one row of logits says before anything is done to it: is it sound, which id is largest, and
// how likely is each id.
//
// All sums run in double, in order of id, with the exponential of common/kernels/math.h: the same
// bits on every machine.

#include <cstdint>
#include <span>
#include <vector>

#include "common/base/result.h"
#include "common/transport/messages/sampler.h"

namespace k3::sampler {

struct Distribution {
    std::uint32_t argmax = 0;  // the lowest id among equals
    double log_sum = 0;        // log of the sum of exp(logit)
};

/// `logits`: [vocab_size] f32. Minus infinity is probability zero (a mask of another stage).
/// Error: corrupt for a NaN, for plus infinity, or if every logit is minus infinity, naming `row`
/// and the id. A token drawn from such a row would look like any other.
Result<Distribution> inspect(std::span<const float> logits, std::size_t row);

/// Natural logarithm of the probability of `id` in the raw distribution.
float logprob(std::span<const float> logits, const Distribution& distribution, std::uint32_t id);

/// The `n` most likely ids, most likely first, equals in order of id. Ids of probability zero are
/// left out.
std::vector<msg::TokenLogprob> top_logprobs(std::span<const float> logits,
                                            const Distribution& distribution, std::uint32_t n);

}  // namespace k3::sampler
