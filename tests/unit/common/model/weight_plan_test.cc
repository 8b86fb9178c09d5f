#include "common/model/weight_plan.h"

#include <doctest/doctest.h>

#include <algorithm>
#include <string>
#include <vector>

#include "common/model/synthetic.h"
#include "common/model/token_cost.h"
#include "common/storage/direct_file.h"
#include "tests/support/text.h"

using namespace k3;
using namespace k3::model;

namespace {

constexpr std::uint64_t kGB = 1'000'000'000;

ModelConfig released_layers() {
    SyntheticOptions options;
    options.n_layers = 93;
    options.n_experts = 896;
    options.vocab_size = 163'840;
    return plan_synthetic(options).value().config;
}

WeightPlan plan(const ModelConfig& config, std::uint64_t budget) {
    WeightPlanOptions options;
    options.n_layers = config.n_layers;
    options.budget_bytes = budget;
    auto planned = plan_weights(config, options);
    REQUIRE(planned.has_value());
    return std::move(planned).value();
}

}  // namespace

TEST_CASE("pieces cover every row of every matrix once, in order") {
    const ModelConfig config = released_layers();
    const WeightPlan p = plan(config, 8 * kGB);
    std::size_t at = 0;
    for (std::uint32_t m = 0; m < p.matrices.size(); ++m) {
        const PlannedMatrix& matrix = p.matrices[m];
        std::uint64_t rows = 0;
        while (at < p.pieces.size() && p.pieces[at].matrix == m) {
            const WeightPiece& piece = p.pieces[at++];
            CHECK(piece.first_row == rows);
            CHECK(piece.bytes == piece.n_rows * matrix.row_bytes());
            CHECK(piece.bytes <= std::uint64_t{32} << 20);
            rows += piece.n_rows;
        }
        CHECK(rows == matrix.spec.shape[0]);
    }
    CHECK(at == p.pieces.size());
    CHECK(p.matrices.back().is_head);
    CHECK(p.n_layer_pieces < p.pieces.size());
}

TEST_CASE("memory stays within the budget and uses it up, to a piece") {
    const ModelConfig config = released_layers();
    const std::uint64_t all = plan(config, 1000 * kGB).memory_bytes();
    std::uint64_t before = token_cost(config).trunk_bytes;
    for (const std::uint64_t budget :
         {kGB / 4, kGB / 2, kGB, 3 * kGB, 8 * kGB, 32 * kGB, 64 * kGB, 100 * kGB, all - 1, all}) {
        CAPTURE(budget);
        const WeightPlan p = plan(config, budget);
        CHECK(p.memory_bytes() <= budget);
        CHECK(p.token_bytes(config) <= before);
        before = p.token_bytes(config);
        // All but the embedding, of which a token needs one row, may fit with room to spare.
        if (p.ring_bytes > 0) CHECK(budget - p.memory_bytes() < std::uint64_t{32} << 20);
        CHECK(p.keeps_all() == (budget >= all));
    }
    CHECK(before == 0);
}

TEST_CASE("the smallest budget is legal, and a byte less is refused with both numbers") {
    const ModelConfig config = released_layers();
    const std::uint64_t smallest = plan(config, kGB).smallest_bytes;
    const WeightPlan p = plan(config, smallest);
    CHECK(p.memory_bytes() == smallest);
    CHECK(smallest < 200'000'000);  // the released trunk has 108.8 GB
    WeightPlanOptions options;
    options.n_layers = config.n_layers;
    options.budget_bytes = smallest - 1;
    const auto refused = plan_weights(config, options);
    REQUIRE(!refused.has_value());
    CHECK(refused.error().code == ErrorCode::invalid_argument);
    CHECK(test::contains(refused.error().message, std::to_string(smallest)));
    CHECK(test::contains(refused.error().message, std::to_string(smallest - 1)));
}

TEST_CASE("what is kept is spread over the layers, the head comes after them") {
    const ModelConfig config = released_layers();
    const WeightPlan p = plan(config, 54 * kGB);  // half of it
    std::vector<double> kept(config.n_layers);
    std::vector<double> bytes(config.n_layers);
    std::uint64_t head_kept = 0;
    for (const WeightPiece& piece : p.pieces) {
        const PlannedMatrix& matrix = p.matrices[piece.matrix];
        if (matrix.is_head) {
            if (piece.is_kept) head_kept += piece.bytes;
            continue;
        }
        bytes[matrix.layer] += static_cast<double>(piece.bytes);
        if (piece.is_kept) kept[matrix.layer] += static_cast<double>(piece.bytes);
    }
    for (std::uint32_t layer = 0; layer < config.n_layers; ++layer) {
        CAPTURE(layer);
        CHECK(kept[layer] / bytes[layer] > 0.4);
        CHECK(kept[layer] / bytes[layer] < 0.6);
    }
    CHECK(head_kept < std::uint64_t{32} << 20);  // where no piece of a layer fitted any more
}

TEST_CASE("a stage plans its own layers only") {
    const ModelConfig config = released_layers();
    WeightPlanOptions options;
    options.first_layer = 10;
    options.n_layers = 5;
    options.budget_bytes = kGB;
    const WeightPlan p = plan_weights(config, options).value();
    CHECK(!p.has_embedding);
    CHECK(p.embedding_bytes == 0);
    CHECK(p.n_layer_pieces == p.pieces.size());
    for (const PlannedMatrix& matrix : p.matrices) {
        CHECK(matrix.layer >= 10);
        CHECK(matrix.layer < 15);
    }
}
