#include "services/sampler/filters.h"

#include <algorithm>

#include "common/base/check.h"
#include "common/kernels/math.h"

namespace k3::sampler {

namespace {

bool larger(const Candidate& a, const Candidate& b) {
    return a.value != b.value ? a.value > b.value : a.id < b.id;
}

void restore_id_order(std::vector<Candidate>& candidates) {
    std::sort(candidates.begin(), candidates.end(),
              [](const Candidate& a, const Candidate& b) { return a.id < b.id; });
}

double total_weight(std::span<const Candidate> candidates) {
    double total = 0;
    for (const Candidate& candidate : candidates) total += candidate.weight;
    return total;
}

}  // namespace

bool has_penalties(const msg::SamplingParams& params) noexcept {
    return params.repetition_penalty != 1 || params.presence_penalty != 0 ||
           params.frequency_penalty != 0;
}

void apply_penalties(std::span<double> values, const msg::SamplingParams& params,
                     std::span<const std::uint32_t> prompt_ids,
                     std::span<const std::uint32_t> generated_ids,
                     std::vector<std::uint32_t>& seen) {
    if (params.repetition_penalty != 1) {
        const double penalty = params.repetition_penalty;
        seen.assign(prompt_ids.begin(), prompt_ids.end());
        seen.insert(seen.end(), generated_ids.begin(), generated_ids.end());
        std::sort(seen.begin(), seen.end());
        seen.erase(std::unique(seen.begin(), seen.end()), seen.end());
        for (const std::uint32_t id : seen)
            values[id] = values[id] > 0 ? values[id] / penalty : values[id] * penalty;
    }
    if (params.presence_penalty == 0 && params.frequency_penalty == 0) return;
    seen.assign(generated_ids.begin(), generated_ids.end());
    std::sort(seen.begin(), seen.end());
    for (std::size_t begin = 0; begin < seen.size();) {
        std::size_t end = begin + 1;
        while (end < seen.size() && seen[end] == seen[begin]) ++end;
        double& value = values[seen[begin]];
        value -= double{params.frequency_penalty} * static_cast<double>(end - begin);
        value -= double{params.presence_penalty};
        begin = end;
    }
}

std::uint32_t argmax(std::span<const double> values) noexcept {
    return static_cast<std::uint32_t>(std::max_element(values.begin(), values.end()) -
                                      values.begin());
}

void weigh(std::span<const double> values, double temperature, std::vector<Candidate>& out) {
    out.clear();
    const double max = values[argmax(values)];
    for (std::size_t id = 0; id < values.size(); ++id) {
        const double scaled = (values[id] - max) / temperature;
        // Below, the exponential is 0; this also catches minus infinity.
        if (!(scaled > -750)) continue;
        const double weight = scaled == 0 ? 1 : kernels::exp_f64(scaled);
        if (weight > 0) out.push_back({static_cast<std::uint32_t>(id), values[id], weight});
    }
}

void keep_top_k(std::vector<Candidate>& candidates, std::uint32_t k) {
    if (k == 0 || k >= candidates.size()) return;
    std::nth_element(candidates.begin(), candidates.begin() + (k - 1), candidates.end(), larger);
    candidates.resize(k);
    restore_id_order(candidates);
}

void keep_top_p(std::vector<Candidate>& candidates, double p) {
    if (p >= 1) return;
    const double target = p * total_weight(candidates);
    // The set is usually small, so the list is sorted piece by piece, as far as needed.
    constexpr std::size_t kFirstPiece = 64;
    constexpr std::size_t kGrowth = 4;
    double sum = 0;
    std::size_t kept = 0;
    std::size_t sorted = 0;
    while (kept < candidates.size() && (kept == 0 || sum < target)) {
        if (kept == sorted) {
            const auto begin = candidates.begin() + static_cast<std::ptrdiff_t>(sorted);
            sorted = std::min(std::max(sorted * kGrowth, kFirstPiece), candidates.size());
            const auto end = candidates.begin() + static_cast<std::ptrdiff_t>(sorted);
            if (end != candidates.end()) std::nth_element(begin, end, candidates.end(), larger);
            std::sort(begin, end, larger);
        }
        sum += candidates[kept++].weight;
    }
    candidates.resize(kept);
    restore_id_order(candidates);
}

void keep_min_p(std::vector<Candidate>& candidates, double p) {
    std::erase_if(candidates, [p](const Candidate& candidate) { return candidate.weight < p; });
}

std::uint32_t draw(std::span<const Candidate> candidates, double u) noexcept {
    K3_CHECK(!candidates.empty(), "every filter keeps the largest candidate");
    const double point = u * total_weight(candidates);
    double sum = 0;
    for (const Candidate& candidate : candidates) {
        sum += candidate.weight;
        if (point < sum) return candidate.id;
    }
    // u * total can round up to total itself.
    return candidates.back().id;
}

}  // namespace k3::sampler
