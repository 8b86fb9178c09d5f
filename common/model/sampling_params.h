#pragma once
// The legal ranges of sampling parameters, in one place: the gateway refuses before it spends a
// prompt's worth of compute, and the sampler refuses whoever speaks to it directly.

#include <cstdint>

#include "common/base/result.h"
#include "common/transport/messages/sampler.h"

namespace k3::model {

inline constexpr float kMaxTemperature = 10.0F;
inline constexpr float kMaxRepetitionPenalty = 10.0F;  // 0 excluded: it divides
inline constexpr float kMaxCountPenalty = 2.0F;        // presence and frequency, both signs
inline constexpr std::uint32_t kMaxLogprobs = 20;

/// temperature [0, 10], top_p (0, 1], min_p [0, 1), repetition_penalty (0, 10], presence_penalty
/// and frequency_penalty [-2, 2]; any top_k and seed. A NaN is in no range.
/// Error: invalid_argument naming the parameter, its value and the range.
Status check_sampling_params(const msg::SamplingParams& params);

/// At most kMaxLogprobs. Error: invalid_argument.
Status check_n_logprobs(std::uint32_t n_logprobs);

}  // namespace k3::model
