#include <doctest/doctest.h>

#include "common/kernels/router.h"
#include "tests/kernels/golden_case.h"

namespace k3::test {

namespace {

using kernels::KernelTable;
using kernels::Matrix;
using kernels::RouterParams;

struct Routing {
    std::vector<float> scores;       // [rows, experts]
    std::vector<std::uint32_t> ids;  // [rows, top_k]
    std::vector<float> weights;      // [rows, top_k]
};

Routing run_router(const GoldenCase& golden, const KernelTable& table, const RouterParams& params) {
    const std::vector<float> x = golden.f32("x");
    const std::vector<float> gate = golden.f32("gate");
    const std::vector<float> bias = golden.f32("bias");
    const std::size_t experts = bias.size();
    const std::size_t n = gate.size() / experts;
    const std::size_t rows = x.size() / n;
    Routing routing{std::vector<float>(rows * experts),
                    std::vector<std::uint32_t>(rows * params.top_k),
                    std::vector<float>(rows * params.top_k)};
    std::vector<float>& scores = routing.scores;
    table.matmul(f32_matrix(gate, experts, n), x.data(), n, rows, scores.data(), experts);
    table.sigmoid(scores.data(), scores.size(), scores.data());
    std::vector<float> scratch(experts);
    for (std::size_t r = 0; r < rows; ++r)
        kernels::route(params, std::span(scores).subspan(r * experts, experts), bias, scratch,
                       std::span(routing.ids).subspan(r * params.top_k, params.top_k),
                       std::span(routing.weights).subspan(r * params.top_k, params.top_k));
    return routing;
}

void check_ids(const GoldenCase& golden, const Routing& routing) {
    const std::vector<std::int64_t> expected = golden.array("ids").as_i64();
    CHECK(std::vector<std::int64_t>(routing.ids.begin(), routing.ids.end()) == expected);
}

void test_router(const GoldenCase& golden, const KernelTable& table) {
    const Routing routing =
        run_router(golden, table,
                   {golden.param<std::size_t>("top_k"), golden.param<bool>("renormalize"),
                    golden.param<float>("routed_scaling_factor")});
    check_ids(golden, routing);
    check_close("scores", routing.scores, golden.f64("scores"));
    check_close("weights", routing.weights, golden.f64("weights"));
}

void test_router_variants(const GoldenCase& golden, const KernelTable& table) {
    const auto top_k = golden.param<std::size_t>("top_k");
    const Routing scaled = run_router(golden, table, {top_k, true, 2.5F});
    check_ids(golden, scaled);
    check_close("weights_scaled_2.5", scaled.weights, golden.f64("weights_scaled_2.5"));
    const Routing raw = run_router(golden, table, {top_k, false, 1.0F});
    check_ids(golden, raw);
    check_close("weights_not_renormalized", raw.weights, golden.f64("weights_not_renormalized"));
}

/// The latent MoE block of spec section 3.9, composed from kernels.
class Moe {
  public:
    Moe(const GoldenCase& golden, const KernelTable& table)
        : golden_(golden),
          table_(table),
          hidden_(golden.param<std::size_t>("hidden")),
          latent_(golden.param<std::size_t>("latent")),
          inner_(golden.param<std::size_t>("moe_intermediate")) {
        for (const char* name : {"w1", "w2", "w3"}) {
            packed_.push_back(golden.u8(std::string(name) + "_packed"));
            scales_.push_back(golden.u8(std::string(name) + "_scale"));
        }
    }

    std::vector<float> product(const std::string& weight, const std::vector<float>& x,
                               std::size_t n_in) const {
        const std::vector<float> w = golden_.f32(weight);
        return product(f32_matrix(w, w.size() / n_in, n_in), x);
    }

    /// w2 * SiTU(w1 z, w3 z) of one expert and row.
    std::vector<float> expert(std::size_t id, const std::vector<float>& z) const {
        std::vector<float> gate = product(expert_matrix(0, id, inner_, latent_), z);
        const std::vector<float> up = product(expert_matrix(2, id, inner_, latent_), z);
        situ(gate, up);
        return product(expert_matrix(1, id, latent_, inner_), gate);
    }

    std::vector<float> shared(const std::vector<float>& x) const {
        std::vector<float> gate = product("shared_gate_proj", x, hidden_);
        situ(gate, product("shared_up_proj", x, hidden_));
        return product("shared_down_proj", gate, gate.size() / (x.size() / hidden_));
    }

  private:
    std::vector<float> product(const Matrix& w, const std::vector<float>& x) const {
        const std::size_t rows = x.size() / w.n_in;
        std::vector<float> y(rows * w.n_out);
        table_.matmul(w, x.data(), w.n_in, rows, y.data(), w.n_out);
        return y;
    }

    void situ(std::vector<float>& gate, const std::vector<float>& up) const {
        table_.situ_glu(gate.data(), up.data(), gate.size(), golden_.param<float>("beta"),
                        golden_.param<float>("linear_beta"), gate.data());
    }

    Matrix expert_matrix(std::size_t which, std::size_t id, std::size_t n_out,
                         std::size_t n_in) const {
        return {kernels::WeightType::mxfp4, packed_[which].data() + id * n_out * n_in / 2,
                scales_[which].data() + id * n_out * n_in / 32, n_out, n_in};
    }

    const GoldenCase& golden_;
    const KernelTable& table_;
    std::size_t hidden_;
    std::size_t latent_;
    std::size_t inner_;
    std::vector<std::vector<std::uint8_t>> packed_;  // w1, w2, w3
    std::vector<std::vector<std::uint8_t>> scales_;
};

void test_moe(const GoldenCase& golden, const KernelTable& table) {
    const auto top_k = golden.param<std::size_t>("top_k");
    const auto hidden = golden.param<std::size_t>("hidden");
    const auto width = golden.param<std::size_t>("latent");
    const Routing routing =
        run_router(golden, table, {top_k, true, golden.param<float>("routed_scaling_factor")});
    check_ids(golden, routing);
    check_close("weights", routing.weights, golden.f64("weights"), kLooseTolerance);

    const Moe moe(golden, table);
    const std::vector<float> x = golden.f32("x");
    const std::size_t rows = x.size() / hidden;
    const std::vector<float> latent = moe.product("routed_expert_down_proj", x, hidden);
    check_close("latent", latent, golden.f64("latent"), kLooseTolerance);

    std::vector<float> outputs;
    std::vector<std::int64_t> sums(rows * width);
    for (std::size_t pick = 0; pick < routing.ids.size(); ++pick) {
        const std::size_t row = pick / top_k;
        const auto at = latent.begin() + static_cast<std::ptrdiff_t>(row * width);
        const std::vector<float> y =
            moe.expert(routing.ids[pick], {at, at + static_cast<std::ptrdiff_t>(width)});
        outputs.insert(outputs.end(), y.begin(), y.end());
        REQUIRE(table.accumulate_fixed(y.data(), width, routing.weights[pick],
                                       sums.data() + row * width) == width);
    }
    check_close("expert_outputs", outputs, golden.f64("expert_outputs"), kLooseTolerance);
    std::vector<float> aggregate(rows * width);
    table.fixed_to_float(sums.data(), sums.size(), aggregate.data());
    check_close("aggregate", aggregate, golden.f64("aggregate"), kLooseTolerance);

    if (golden.param<bool>("latent_moe_use_norm")) {
        const std::vector<float> norm = golden.f32("routed_expert_norm");
        for (std::size_t r = 0; r < rows; ++r)
            table.rms_norm(&aggregate[r * width], norm.data(), width, golden.param<float>("eps"),
                           &aggregate[r * width]);
        check_close("aggregate_normed", aggregate, golden.f64("aggregate_normed"), kLooseTolerance);
    }
    std::vector<float> y = moe.product("routed_expert_up_proj", aggregate, width);
    check_close("routed", y, golden.f64("routed"), kLooseTolerance);
    const std::vector<float> shared = moe.shared(x);
    check_close("shared", shared, golden.f64("shared"), kLooseTolerance);
    table.add(shared.data(), y.size(), y.data());
    check_close("y", y, golden.f64("y"), kLooseTolerance);
}

}  // namespace

void add_moe_tests(GoldenTests& tests) {
    tests["router"] = test_router;
    tests["router_896"] = test_router;
    tests["router_variants"] = test_router_variants;
    tests["moe"] = test_moe;
    tests["moe_without_latent_norm"] = test_moe;
}

}  // namespace k3::test
