#pragma once
// One token from one row of logits: validation, filters and draw put together.

#include <cstdint>
#include <span>
#include <vector>

#include "common/base/result.h"
#include "common/transport/messages/sampler.h"
#include "services/sampler/filters.h"

namespace k3::sampler {

/// Scratch space of sample_row, kept between calls so that a row in steady state allocates little.
/// It carries nothing from one call to the next.
struct Workspace {
    std::vector<double> values;
    std::vector<Candidate> candidates;
    std::vector<std::uint32_t> seen;
};

/// What can be said about the row's parameters without its logits. `row` is its index.
/// Error: invalid_argument naming row, parameter, value and range.
Status check_row(const msg::SampleRow& params, std::size_t row, std::size_t vocab_size);

/// The token. `logits`: [vocab_size] f32, `params` has passed check_row.
/// Temperature 0 takes the largest logit after penalties, the lowest id among equals.
/// `logprob` and `top` describe the raw distribution, before penalties, temperature and filters.
/// Error: corrupt, see distribution.h.
Result<msg::SampledRow> sample_row(std::span<const float> logits, const msg::SampleRow& params,
                                   std::size_t row, Workspace& workspace);

}  // namespace k3::sampler
