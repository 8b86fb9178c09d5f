#include "services/sampler/distribution.h"

#include <fmt/format.h>

#include <algorithm>
#include <limits>

#include "common/kernels/math.h"

namespace k3::sampler {

namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

Error corrupt(std::size_t row, std::string_view what) {
    return Error{ErrorCode::corrupt, fmt::format("row {} of the logits {}", row, what),
                 "the stage that computed them is faulty: look at the trunk's log and checkpoint"};
}

}  // namespace

Result<Distribution> inspect(std::span<const float> logits, std::size_t row) {
    Distribution out;
    float max = -kInfinity;
    for (std::size_t id = 0; id < logits.size(); ++id) {
        // True for a NaN and for plus infinity, and for no other value.
        if (!(logits[id] < kInfinity))
            return corrupt(row, fmt::format("holds {} at id {}", logits[id], id));
        if (logits[id] > max) {
            max = logits[id];
            out.argmax = static_cast<std::uint32_t>(id);
        }
    }
    if (max == -kInfinity)
        return corrupt(row, fmt::format("holds -inf at every id from 0 to {}", logits.size() - 1));

    double sum = 0;
    for (const float logit : logits) {
        if (logit > -kInfinity) sum += kernels::exp_f64(double{logit} - double{max});
    }
    out.log_sum = double{max} + kernels::log_f64(sum);
    return out;
}

float logprob(std::span<const float> logits, const Distribution& distribution, std::uint32_t id) {
    return static_cast<float>(double{logits[id]} - distribution.log_sum);
}

std::vector<msg::TokenLogprob> top_logprobs(std::span<const float> logits,
                                            const Distribution& distribution, std::uint32_t n) {
    // `best` stays sorted; n is at most 20, and a new entry is rare after the first few thousand.
    std::vector<std::uint32_t> best;
    if (n == 0) return {};
    for (std::uint32_t id = 0; id < logits.size(); ++id) {
        if (best.size() == n && logits[id] <= logits[best.back()]) continue;
        if (logits[id] == -kInfinity) continue;
        const auto place = std::upper_bound(
            best.begin(), best.end(), id,
            [&](std::uint32_t a, std::uint32_t b) { return logits[a] > logits[b]; });
        best.insert(place, id);
        if (best.size() > n) best.pop_back();
    }
    std::vector<msg::TokenLogprob> out;
    out.reserve(best.size());
    for (const std::uint32_t id : best) out.push_back({id, logprob(logits, distribution, id)});
    return out;
}

}  // namespace k3::sampler
