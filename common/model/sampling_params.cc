#include "common/model/sampling_params.h"

#include <fmt/format.h>

#include <string_view>

namespace k3::model {

namespace {

Status refuse(std::string_view name, float value, std::string_view range) {
    return Error{ErrorCode::invalid_argument, fmt::format("{} {} is not allowed", name, value),
                 fmt::format("choose one {}", range)};
}

}  // namespace

// Every comparison is written so that a NaN fails it.
Status check_sampling_params(const msg::SamplingParams& params) {
    if (!(params.temperature >= 0 && params.temperature <= kMaxTemperature))
        return refuse("temperature", params.temperature, "from 0 to 10");
    if (!(params.top_p > 0 && params.top_p <= 1))
        return refuse("top_p", params.top_p, "above 0, up to 1");
    if (!(params.min_p >= 0 && params.min_p < 1))
        return refuse("min_p", params.min_p, "from 0, below 1");
    if (!(params.repetition_penalty > 0 && params.repetition_penalty <= kMaxRepetitionPenalty))
        return refuse("repetition_penalty", params.repetition_penalty, "above 0, up to 10");
    if (!(params.presence_penalty >= -kMaxCountPenalty &&
          params.presence_penalty <= kMaxCountPenalty))
        return refuse("presence_penalty", params.presence_penalty, "from -2 to 2");
    if (!(params.frequency_penalty >= -kMaxCountPenalty &&
          params.frequency_penalty <= kMaxCountPenalty))
        return refuse("frequency_penalty", params.frequency_penalty, "from -2 to 2");
    return Status::ok();
}

Status check_n_logprobs(std::uint32_t n_logprobs) {
    if (n_logprobs <= kMaxLogprobs) return Status::ok();
    return Error{
        ErrorCode::invalid_argument,
        fmt::format("n_logprobs {} is outside its range 0 to {}", n_logprobs, kMaxLogprobs),
        fmt::format("ask for at most {} alternatives per token", kMaxLogprobs)};
}

}  // namespace k3::model
