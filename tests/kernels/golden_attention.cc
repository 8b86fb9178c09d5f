#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>

#include "common/kernels/math.h"
#include "tests/kernels/golden_case.h"

namespace k3::test {

namespace {

using kernels::KernelTable;
using kernels::Matrix;

void test_kda_gate(const GoldenCase& golden, const KernelTable& table) {
    const auto heads = golden.param<std::size_t>("heads");
    const auto dim = golden.param<std::size_t>("head_dim");
    const auto bound = golden.param<float>("lower_bound");
    const std::vector<float> z = golden.f32("z");
    const std::vector<float> a_log = golden.f32("A_log");
    const std::vector<float> dt_bias = golden.f32("dt_bias");
    std::vector<float> alpha(z.size());
    std::vector<float> g(z.size());
    for (std::size_t at = 0; at < z.size(); at += dim) {
        const std::size_t head = at / dim % heads;
        const float exp_a_log = kernels::exp_f32(a_log[head]);
        const float* bias = dt_bias.data() + head * dim;
        table.kda_decay(z.data() + at, bias, dim, exp_a_log, bound, alpha.data() + at);
        for (std::size_t c = 0; c < dim; ++c) g[at + c] = exp_a_log * (z[at + c] + bias[c]);
        table.sigmoid(g.data() + at, dim, g.data() + at);
        for (std::size_t c = 0; c < dim; ++c) g[at + c] *= bound;
    }
    check_close("alpha", alpha, golden.f64("alpha"));
    check_close("g", g, golden.f64("g"));
}

struct Recurrence {
    std::vector<float> state;        // [heads, dim, dim]
    std::vector<float> state_first;  // after the first token
    std::vector<float> o;            // [tokens, heads, dim]
};

/// Feeds all tokens, `chunk` of them per head at a time.
Recurrence run_recurrence(const GoldenCase& golden, const KernelTable& table, std::size_t chunk) {
    const auto heads = golden.param<std::size_t>("heads");
    const auto dim = golden.param<std::size_t>("head_dim");
    const auto tokens = golden.param<std::size_t>("tokens");
    std::vector<float> q = golden.f32("q");
    std::vector<float> k = golden.f32("k");
    std::vector<float> alpha = golden.f32("g");
    const std::vector<float> v = golden.f32("v");
    const std::vector<float> beta = golden.f32("beta");
    for (float& value : alpha) value = kernels::exp_f32(value);
    const float q_scale = 1.0F / std::sqrt(static_cast<float>(dim));
    Recurrence run{golden.f32("state"), {}, std::vector<float>(q.size())};
    std::vector<float> scratch(dim);
    for (std::size_t begin = 0; begin < tokens; begin += chunk) {
        for (std::size_t head = 0; head < heads; ++head) {
            for (std::size_t t = begin; t < std::min(begin + chunk, tokens); ++t) {
                const std::size_t at = (t * heads + head) * dim;
                table.l2_norm(&q[at], dim, 1e-6F, q_scale, &q[at]);
                table.l2_norm(&k[at], dim, 1e-6F, 1.0F, &k[at]);
                table.kda_step(&run.state[head * dim * dim], &q[at], &k[at], &v[at], &alpha[at],
                               beta[t * heads + head], dim, dim, scratch.data(), &run.o[at]);
            }
        }
        if (begin == 0) run.state_first = run.state;
    }
    return run;
}

void test_recurrence(const GoldenCase& golden, const KernelTable& table) {
    const double tolerance = golden.name == "kda_recurrence_long" ? kLooseTolerance : kTolerance;
    const Recurrence by_token = run_recurrence(golden, table, 1);
    check_close("o", by_token.o, golden.f64("o"), tolerance);
    check_close("state_after", by_token.state, golden.f64("state_after"), tolerance);
    if (golden.manifest.at("outputs").contains("state_after_first"))
        check_close("state_after_first", by_token.state_first, golden.f64("state_after_first"));
    for (std::size_t chunk : {2, 7, 16, 64, 70}) {
        const Recurrence by_chunk = run_recurrence(golden, table, chunk);
        CHECK(by_chunk.o == by_token.o);
        CHECK(by_chunk.state == by_token.state);
    }
}

struct MlaResult {
    std::vector<float> y;
    std::vector<float> new_latent;
    std::vector<float> new_rope;
};

/// The whole gated MLA layer in the absorbed form of spec section 3.7, one token.
MlaResult run_mla(const GoldenCase& golden, const KernelTable& table, float lora_eps) {
    const auto heads = golden.param<std::size_t>("heads");
    const auto nope = golden.param<std::size_t>("qk_nope_head_dim");
    const auto rope = golden.param<std::size_t>("qk_rope_head_dim");
    const auto v_dim = golden.param<std::size_t>("v_head_dim");
    const auto q_rank = golden.param<std::size_t>("q_lora_rank");
    const auto kv_rank = golden.param<std::size_t>("kv_lora_rank");
    const std::vector<float> x = golden.f32("x");

    // Weights as the checkpoint stores them: bf16, exact here.
    const auto product = [&](const std::string& weight, const std::vector<float>& input) {
        const std::vector<std::uint16_t> stored = as_bf16(golden.f32(weight));
        const std::size_t n_out = stored.size() / input.size();
        std::vector<float> y(n_out);
        table.matmul({kernels::WeightType::bf16, stored.data(), nullptr, n_out, input.size()},
                     input.data(), input.size(), 1, y.data(), n_out);
        return y;
    };

    std::vector<float> q_a = product("q_a_proj", x);
    table.rms_norm(q_a.data(), golden.f32("q_a_layernorm").data(), q_rank, lora_eps, q_a.data());
    const std::vector<float> q = product("q_b_proj", q_a);

    MlaResult result;
    const std::vector<float> kv_a = product("kv_a_proj_with_mqa", x);
    result.new_latent.resize(kv_rank);
    table.rms_norm(kv_a.data(), golden.f32("kv_a_layernorm").data(), kv_rank, lora_eps,
                   result.new_latent.data());
    result.new_rope.assign(kv_a.begin() + static_cast<std::ptrdiff_t>(kv_rank), kv_a.end());

    std::vector<float> latent;
    std::vector<float> rope_keys;
    if (golden.manifest.at("inputs").contains("cached_latent")) {
        latent = golden.f32("cached_latent");
        rope_keys = golden.f32("cached_rope");
    }
    latent.insert(latent.end(), result.new_latent.begin(), result.new_latent.end());
    rope_keys.insert(rope_keys.end(), result.new_rope.begin(), result.new_rope.end());
    const std::size_t n_positions = rope_keys.size() / rope;

    const std::vector<float> kv_b = golden.f32("kv_b_proj");
    const Matrix kv_b_matrix = f32_matrix(kv_b, heads * (nope + v_dim), kv_rank);
    const float scale = 1.0F / std::sqrt(static_cast<float>(nope + rope));
    std::vector<float> o(heads * v_dim);
    std::vector<float> q_latent(kv_rank);
    std::vector<float> mixed(kv_rank);
    std::vector<float> scores(n_positions);
    for (std::size_t head = 0; head < heads; ++head) {
        const float* q_head = q.data() + head * (nope + rope);
        const Matrix uk = kv_b_matrix.rows(head * (nope + v_dim), nope);
        const Matrix uv = kv_b_matrix.rows(head * (nope + v_dim) + nope, v_dim);
        table.matvec_transposed(uk, q_head, q_latent.data());
        table.mla_attend(q_latent.data(), q_head + nope, latent.data(), kv_rank, rope_keys.data(),
                         rope, n_positions, kv_rank, rope, scale, scores.data(), mixed.data());
        table.matmul(uv, mixed.data(), kv_rank, 1, &o[head * v_dim], v_dim);
    }
    const std::vector<float> gate = product("g_proj", x);
    table.sigmoid_gate(o.data(), gate.data(), o.size(), o.data());
    result.y = product("o_proj", o);
    return result;
}

void test_mla(const GoldenCase& golden, const KernelTable& table) {
    const MlaResult right = run_mla(golden, table, golden.param<float>("lora_norm_eps"));
    check_close("y", right.y, golden.f64("y"));
    check_close("new_latent", right.new_latent, golden.f64("new_latent"));
    check_close("new_rope", right.new_rope, golden.f64("new_rope"));
    const MlaResult other = run_mla(golden, table, 1e-5F);
    check_close("y_if_eps_were_1e-5", other.y, golden.f64("y_if_eps_were_1e-5"));
    check_close("new_latent_if_eps_were_1e-5", other.new_latent,
                golden.f64("new_latent_if_eps_were_1e-5"));
}

void test_attn_res(const GoldenCase& golden, const KernelTable& table) {
    const std::vector<float> sources = golden.f32("sources");
    std::vector<float> query = golden.f32("norm_weight");
    const std::vector<float> projection = golden.f32("proj_weight");
    const std::size_t n = query.size();
    for (std::size_t i = 0; i < n; ++i) query[i] *= projection[i];
    for (std::size_t count : {1, 2, 4, 6}) {
        std::vector<const float*> pointers;
        for (std::size_t i = 0; i < count; ++i) pointers.push_back(sources.data() + i * n);
        std::vector<float> weights(count);
        std::vector<float> y(n);
        table.attn_res_mix(pointers.data(), count, n, query.data(), golden.param<float>("eps"),
                           weights.data(), y.data());
        const std::string suffix = "_first_" + std::to_string(count);
        check_close("y" + suffix, y, golden.f64("y" + suffix));
        check_close("weights" + suffix, weights, golden.f64("weights" + suffix));
    }
}

}  // namespace

void add_attention_tests(GoldenTests& tests) {
    tests["kda_gate"] = test_kda_gate;
    for (const char* name :
         {"kda_recurrence", "kda_recurrence_128", "kda_recurrence_small_qk", "kda_recurrence_long"})
        tests[name] = test_recurrence;
    for (const char* name : {"mla_step", "mla_first", "mla_step_small_latent"})
        tests[name] = test_mla;
    tests["attn_res"] = test_attn_res;
}

}  // namespace k3::test
