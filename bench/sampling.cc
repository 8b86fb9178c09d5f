#include "bench/sampling.h"

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "bench/machine.h"
#include "services/sampler/sample_row.h"

namespace k3::bench {

namespace {

constexpr std::size_t kVocabulary = 163840;
constexpr int kDraws = 21;

/// Like a language model's: a bell of small values, and few that stand out.
std::vector<float> logits() {
    std::vector<float> out(kVocabulary);
    std::uint64_t state = 88172645463325252ULL;
    for (float& value : out) {
        float sum = 0;
        for (int i = 0; i < 4; ++i) {
            state = state * 6364136223846793005ULL + 1442695040888963407ULL;
            sum += static_cast<float>(state >> 40U) / 16777216.0F;
        }
        value = 4 * (sum - 2);
        if (state >> 52U == 0) value += 12;
    }
    return out;
}

struct Way {
    std::string name;
    msg::SampleRow row;
};

std::vector<Way> ways() {
    std::vector<Way> all;
    const auto add = [&all](const char* name, auto set) {
        msg::SampleRow row;
        row.params.temperature = 1;
        set(row);
        all.push_back({name, row});
    };
    add("greedy", [](msg::SampleRow& row) { row.params.temperature = 0; });
    add("greedy, penalties of 4,096 ids", [](msg::SampleRow& row) {
        row.params.temperature = 0;
        row.params.repetition_penalty = 1.1;
        for (std::uint32_t id = 0; id < 4096; ++id) row.generated_ids.push_back(id * 7);
    });
    add("temperature 1", [](msg::SampleRow&) {});
    add("top-k 50", [](msg::SampleRow& row) { row.params.top_k = 50; });
    add("top-p 0.95", [](msg::SampleRow& row) { row.params.top_p = 0.95; });
    add("min-p 0.05", [](msg::SampleRow& row) { row.params.min_p = 0.05; });
    add("greedy, 20 log probabilities", [](msg::SampleRow& row) {
        row.params.temperature = 0;
        row.n_logprobs = 20;
    });
    return all;
}

}  // namespace

nlohmann::json measure_sampling() {
    const std::vector<float> row = logits();
    sampler::Workspace workspace;
    nlohmann::json results = nlohmann::json::array();
    std::printf("\n%-34s %10s\n", "sampler, a row of 163,840 logits", "median");
    for (const Way& way : ways()) {
        std::vector<double> times;
        for (int round = 0; round < kDraws; ++round) {
            const double start = now();
            const auto sampled = sampler::sample_row(row, way.row, 0, workspace);
            times.push_back(now() - start);
            if (!sampled.has_value()) std::printf("%s\n", sampled.error().sentence().c_str());
        }
        std::nth_element(times.begin(), times.begin() + kDraws / 2, times.end());
        std::printf("%-34s %7.0f us\n", way.name.c_str(), 1e6 * times[kDraws / 2]);
        results.push_back({{"way", way.name}, {"median_s", times[kDraws / 2]}});
    }
    return results;
}

}  // namespace k3::bench
