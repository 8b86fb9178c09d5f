// The forward pass against the float64 reference on tiny-k3: every prompt, every layer, every
// position. Tolerance: max|engine - expected| / max|expected| <= 5e-5 (tests/golden/README.md).

#include <doctest/doctest.h>

#include <algorithm>
#include <limits>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "tests/support/golden.h"
#include "tests/unit/services/trunk/harness.h"

namespace k3::test {

namespace {

using trunk::MixSite;
using trunk::RowsView;
using trunk::Site;

constexpr double kTolerance = 5e-5;

/// Everything a step shows, appended step after step.
class Recorder final : public trunk::StepObserver {
  public:
    void on_rows(Site site, std::uint32_t layer, const RowsView& rows) override {
        auto& out = rows_[{site, layer}];
        for (std::size_t r = 0; r < rows.n_rows; ++r)
            out.insert(out.end(), rows.row(r).begin(), rows.row(r).end());
    }
    void on_mix(MixSite site, std::uint32_t layer, const RowsView& rows) override {
        const auto last = rows.row(rows.n_rows - 1);
        mix_[{site, layer}].assign(last.begin(), last.end());
    }
    void on_routing(std::uint32_t layer, const trunk::RoutingView& r) override {
        auto& out = routing_[layer];
        out.ids.insert(out.ids.end(), r.ids, r.ids + r.n_rows * r.top_k);
        out.weights.insert(out.weights.end(), r.weights, r.weights + r.n_rows * r.top_k);
        out.scores.insert(out.scores.end(), r.scores, r.scores + r.n_rows * r.n_experts);
    }

    struct Chosen {
        std::vector<std::uint32_t> ids;
        std::vector<float> weights;
        std::vector<float> scores;
    };
    const std::vector<float>& rows(Site site, std::uint32_t layer) { return rows_[{site, layer}]; }
    std::span<const float> last(Site site, std::uint32_t layer) {
        const auto& all = rows(site, layer);
        return std::span(all).last(tiny_model().config.hidden_size);
    }
    const std::vector<float>& mix(MixSite site, std::uint32_t layer) { return mix_[{site, layer}]; }
    const Chosen& routing(std::uint32_t layer) { return routing_[layer]; }
    void clear() { *this = Recorder(); }

  private:
    std::map<std::pair<Site, std::uint32_t>, std::vector<float>> rows_;
    std::map<std::pair<MixSite, std::uint32_t>, std::vector<float>> mix_;
    std::map<std::uint32_t, Chosen> routing_;
};

/// The error against expected/<name>.npy, printed: these figures belong into reports.
double error_of(const std::vector<float>& actual, const std::string& name) {
    const Array expected = load_npy("expected/" + name + ".npy");
    REQUIRE(actual.size() == expected.size());
    const double error = relative_error(actual, expected.as_f64());
    MESSAGE(name << ": " << error);
    return error;
}

void append(std::vector<float>& out, std::span<const float> values) {
    out.insert(out.end(), values.begin(), values.end());
}

std::vector<std::set<std::uint32_t>> as_sets(std::span<const std::uint32_t> ids,
                                             std::size_t top_k) {
    std::vector<std::set<std::uint32_t>> sets;
    for (std::size_t i = 0; i < ids.size(); i += top_k)
        sets.emplace_back(ids.begin() + static_cast<std::ptrdiff_t>(i),
                          ids.begin() + static_cast<std::ptrdiff_t>(i + top_k));
    return sets;
}

std::vector<std::uint32_t> expected_ids(const std::string& name) {
    std::vector<std::uint32_t> ids;
    for (std::int64_t id : load_npy("expected/" + name + ".npy").as_i64())
        ids.push_back(static_cast<std::uint32_t>(id));
    return ids;
}

void check_hidden_rows(Recorder& seen, const std::string& prompt) {
    const auto& config = tiny_model().config;
    std::vector<float> out, last, mixes;
    for (std::uint32_t layer = 0; layer < config.n_layers; ++layer) {
        append(out, seen.rows(Site::layer_out, layer));
        for (Site site : {Site::attention_in, Site::attention_out, Site::mlp_in, Site::mlp_out,
                          Site::layer_out})
            append(last, seen.last(site, layer));
        for (MixSite site : {MixSite::attention, MixSite::mlp}) {
            std::vector<float> weights = seen.mix(site, layer);
            weights.resize(6, std::numeric_limits<float>::quiet_NaN());
            append(mixes, weights);
        }
    }
    CHECK(error_of(out, prompt + "/hidden_out") <= kTolerance);
    CHECK(error_of(last, prompt + "/hidden_last") <= kTolerance);
    CHECK(error_of(mixes, prompt + "/attn_res_weights_last") <= kTolerance);
    std::vector<float> head;
    append(head, seen.last(Site::embedding, 0));
    append(head, seen.last(Site::output_mix, config.n_layers - 1));
    append(head, seen.last(Site::final_norm, config.n_layers - 1));
    CHECK(error_of(head, prompt + "/head_last") <= kTolerance);
}

void check_routing(Recorder& seen, const std::string& prompt) {
    const auto& config = tiny_model().config;
    std::vector<float> weights, scores;
    std::vector<std::uint32_t> ids;
    for (std::uint32_t layer = config.first_k_dense; layer < config.n_layers; ++layer) {
        const auto& chosen = seen.routing(layer);
        append(weights, chosen.weights);
        append(scores, chosen.scores);
        ids.insert(ids.end(), chosen.ids.begin(), chosen.ids.end());
    }
    CHECK(as_sets(ids, config.moe.top_k) ==
          as_sets(expected_ids(prompt + "/router_ids"), config.moe.top_k));
    CHECK(error_of(weights, prompt + "/router_weights") <= kTolerance);
    CHECK(error_of(scores, prompt + "/router_scores") <= kTolerance);
}

/// `folder`: "p12/state" or "p12/state_end".
void check_state(Harness& trunk, std::uint64_t session, const std::string& folder) {
    const auto& kda = tiny_model().config.kda;
    const auto& mla = tiny_model().config.mla;
    for (std::uint32_t layer : {0U, 10U}) {
        const std::string suffix = layer == 0 ? "00" : "10";
        trunk::Session& state = trunk.session(session, layer);
        std::vector<float> matrices;
        std::vector<float> histories(3 * std::size_t{kda.width()} * (kda.conv_kernel - 1));
        for (std::size_t head = 0; head < kda.n_heads; ++head) {
            const trunk::KdaHeadState at = state.kda(layer, head);
            append(matrices, {at.matrix, std::size_t{kda.head_dim} * kda.head_dim});
            const float* parts[] = {at.q_history, at.k_history, at.v_history};
            for (std::size_t part = 0; part < 3; ++part)
                for (std::size_t c = 0; c < kda.head_dim; ++c)
                    for (std::size_t j = 0; j + 1 < kda.conv_kernel; ++j)
                        histories[(part * kda.width() + head * kda.head_dim + c) *
                                      (kda.conv_kernel - 1) +
                                  j] = parts[part][j * kda.head_dim + c];
        }
        CHECK(error_of(matrices, folder + "/kda_S_layer" + suffix) <= kTolerance);
        CHECK(error_of(histories, folder + "/kda_conv_layer" + suffix) <= kTolerance);
    }
    trunk::Session& state = trunk.session(session, 3);
    const std::size_t n = state.position();
    const trunk::MlaState cache = state.mla(3);
    const auto* latents = reinterpret_cast<const float*>(cache.latent);
    const auto* keys = reinterpret_cast<const float*>(cache.rope);
    const std::vector<float> latent(latents, latents + n * mla.kv_lora_rank);
    const std::vector<float> rope(keys, keys + n * mla.qk_rope_head_dim);
    CHECK(error_of(latent, folder + "/mla_latent_layer03") <= kTolerance);
    CHECK(error_of(rope, folder + "/mla_rope_layer03") <= kTolerance);
}

}  // namespace

TEST_CASE("every prompt of tiny-k3 gives the reference's rows, routing, states and logits") {
    Harness trunk(tiny_model());
    Recorder seen;
    trunk.set_observer(&seen);
    for (const GoldenPrompt& prompt : golden_prompts()) {
        CAPTURE(prompt.name);
        seen.clear();
        trunk.open(1);
        const std::vector<float> logits = trunk.feed(1, prompt.ids, prompt.ids.size());
        CHECK(error_of(logits, prompt.name + "/logits") <= kTolerance);
        check_hidden_rows(seen, prompt.name);
        check_routing(seen, prompt.name);
        check_state(trunk, 1, prompt.name + "/state");
        trunk.drop(1);
    }
}

TEST_CASE("64 greedy tokens, their experts and the state at the end equal the reference's") {
    Harness trunk(tiny_model());
    Recorder seen;
    const std::size_t top_k = tiny_model().config.moe.top_k;
    for (const GoldenPrompt& prompt : golden_prompts()) {
        CAPTURE(prompt.name);
        trunk.open(1);
        trunk.set_observer(nullptr);
        std::vector<std::uint32_t> tokens = trunk.greedy(1, prompt.ids, 1, {});
        trunk.set_observer(&seen);
        seen.clear();
        while (tokens.size() < prompt.greedy.size()) {
            const std::vector<float> logits = trunk.feed(1, {tokens.back()}, 1);
            tokens.push_back(argmax(logits));
        }
        CHECK(tokens == prompt.greedy);

        std::vector<std::uint32_t> ids;
        for (std::uint32_t layer = 1; layer < tiny_model().config.n_layers; ++layer)
            ids.insert(ids.end(), seen.routing(layer).ids.begin(), seen.routing(layer).ids.end());
        CHECK(as_sets(ids, top_k) ==
              as_sets(expected_ids(prompt.name + "/greedy_router_ids"), top_k));
        if (prompt.name == "p12") check_state(trunk, 1, "p12/state_end");
        trunk.drop(1);
    }
}

}  // namespace k3::test
