#pragma once
// Plain forms of proto/sampler.capnp, which documents every field.

#include <cstdint>
#include <vector>

#include "common/transport/messages/types.h"

namespace k3::msg {

struct SamplingParams {
    float temperature = 1.0F;
    std::uint32_t top_k = 0;
    float top_p = 1.0F;
    float min_p = 0.0F;
    float repetition_penalty = 1.0F;
    float presence_penalty = 0.0F;
    float frequency_penalty = 0.0F;
    std::uint64_t seed = 0;
    bool operator==(const SamplingParams&) const = default;
};

struct SampleRow {
    SamplingParams params;
    std::uint64_t step_index = 0;
    std::vector<std::uint32_t> prompt_ids;
    std::vector<std::uint32_t> generated_ids;
    std::uint32_t n_logprobs = 0;
    std::vector<std::uint32_t> stop_ids;
    bool operator==(const SampleRow&) const = default;
};

struct Sample {
    Tensor logits;
    std::vector<SampleRow> rows;
    bool operator==(const Sample&) const = default;
};

struct TokenLogprob {
    std::uint32_t id = 0;
    float logprob = 0;
    bool operator==(const TokenLogprob&) const = default;
};

struct SampledRow {
    std::uint32_t id = 0;
    float logprob = 0;
    std::vector<TokenLogprob> top;
    bool is_stop = false;
    bool operator==(const SampledRow&) const = default;
};

struct Sampled {
    std::vector<SampledRow> rows;
    bool operator==(const Sampled&) const = default;
};

}  // namespace k3::msg
