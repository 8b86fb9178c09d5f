// What a stage takes is what common/model/memory_plan.h says.

#include <doctest/doctest.h>
#include <malloc.h>

#include "common/model/memory_plan.h"
#include "services/trunk/ram_weights.h"
#include "services/trunk/stage.h"
#include "tests/unit/services/trunk/harness.h"

using namespace k3;
using namespace k3::test;

namespace {

/// Granted by malloc and not given back.
std::uint64_t allocated_bytes() {
    const struct mallinfo2 info = ::mallinfo2();
    return info.uordblks + info.hblkhd;
}

}  // namespace

TEST_CASE("weights kept in memory have the planned bytes, in every range") {
    for (const model::Model* model : {&tiny_model(), &demo_model()}) {
        const std::uint32_t n = model->config.n_layers;
        for (const model::LayerRange range :
             {model::LayerRange{0, n}, {0, 1}, {1, n - 2}, {n - 1, 1}}) {
            CAPTURE(range.first);
            CAPTURE(range.count);
            const auto weights =
                trunk::RamWeights::load(*model->checkpoint, model->config, range, nullptr);
            REQUIRE(weights.has_value());
            CHECK((*weights)->bytes() == model::resident_weight_bytes(model->config, range));
        }
    }
}

#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
TEST_CASE("the buffers of a step have the planned bytes, in every range") {
    LocalExperts experts(tiny_model(), kernels::kernels());
    const model::ModelConfig& config = tiny_model().config;
    for (const model::LayerRange range :
         {model::LayerRange{0, 13}, {0, 3}, {3, 1}, {4, 3}, {12, 1}}) {
        CAPTURE(range.first);
        CAPTURE(range.count);
        auto weights = trunk::RamWeights::load(*tiny_model().checkpoint, config, range, nullptr);
        REQUIRE(weights.has_value());
        constexpr std::size_t kRows = 4096;
        constexpr int kThreads = 3;
        const std::uint64_t before = allocated_bytes();
        const auto stage = trunk::Stage::create(config, **weights, experts, kernels::kernels(),
                                                {range, kRows, kThreads});
        const std::uint64_t taken = allocated_bytes() - before;
        REQUIRE(stage.has_value());
        const std::uint64_t planned =
            model::step_buffer_bytes(config, range, kRows, static_cast<std::uint64_t>(kThreads));
        CHECK(taken >= planned);
        // Alignment and lists of rows.
        CHECK(taken < planned + planned / 100 + kRows * 64 + 32 * 4096);
    }
}
#endif
