#pragma once
// From logits to the ids that may be drawn, step by step, and the draw.
//
// The order is the customary one, and changing it changes the text:
//   penalties -> temperature -> top-k -> top-p -> min-p -> draw
// A filter that is off changes nothing at all, not even the last bit: candidates always stand in
// order of id when they are summed and drawn, whichever filters ran before.
//
// Exact on every machine: double arithmetic, own exponential, total orders for every selection.

#include <cstdint>
#include <span>
#include <vector>

#include "common/transport/messages/sampler.h"

namespace k3::sampler {

/// An id that can still be drawn.
struct Candidate {
    std::uint32_t id = 0;
    double value = 0;   // logit after penalties; decides order, equals go to the lower id
    double weight = 0;  // exp((value - largest value) / temperature), so the largest is exactly 1
};

/// True if any of the three penalties would change a logit.
bool has_penalties(const msg::SamplingParams& params) noexcept;

/// Changes `values` [vocab_size], the logits widened, in place. For every id in `prompt_ids` or
/// `generated_ids`, once: a positive value is divided by repetition_penalty, any other multiplied
/// (Keskar et al., "CTRL", section 4.1, with the sign rule that all engines add). Then for every id
/// in `generated_ids`: minus frequency_penalty times its count, minus presence_penalty.
/// Ids must be below vocab_size. `seen` is scratch space.
void apply_penalties(std::span<double> values, const msg::SamplingParams& params,
                     std::span<const std::uint32_t> prompt_ids,
                     std::span<const std::uint32_t> generated_ids,
                     std::vector<std::uint32_t>& seen);

/// The id of the largest value, the lowest among equals.
std::uint32_t argmax(std::span<const double> values) noexcept;

/// Weights at `temperature` > 0, in order of id. Ids whose weight underflows to 0 are left out:
/// they can never be drawn.
void weigh(std::span<const double> values, double temperature, std::vector<Candidate>& out);

/// Keeps the k largest; 0 keeps all.
void keep_top_k(std::vector<Candidate>& candidates, std::uint32_t k);

/// Keeps the smallest set of the largest candidates that together have at least the share `p` of
/// the weight that is left, the one that reaches it included; 1 keeps all.
void keep_top_p(std::vector<Candidate>& candidates, double p);

/// Keeps what has at least the share `p` of the largest weight; 0 keeps all.
void keep_min_p(std::vector<Candidate>& candidates, double p);

/// The id whose interval of the cumulated weights contains `u` in [0, 1).
std::uint32_t draw(std::span<const Candidate> candidates, double u) noexcept;

}  // namespace k3::sampler
