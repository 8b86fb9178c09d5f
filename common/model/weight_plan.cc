#include "common/model/weight_plan.h"

#include <fmt/format.h>

#include <algorithm>
#include <string_view>

#include "common/base/check.h"
#include "common/base/settings.h"
#include "common/storage/direct_file.h"

namespace k3::model {

namespace {

constexpr std::uint64_t kGoodRingBytes = std::uint64_t{256} << 20;
constexpr std::uint64_t kMostRingBytes = std::uint64_t{512} << 20;
constexpr std::uint64_t kSmallMatrix = std::uint64_t{4} << 20;
constexpr std::uint64_t kRowBlock = 48;  // rows that kernels like to take together

/// A step's order. The trunk's KDA, MLA and FFN follow it, and the weight stream checks that they
/// do.
constexpr std::string_view kOrder[] = {
    "self_attn.q_proj.weight",
    "self_attn.k_proj.weight",
    "self_attn.v_proj.weight",
    "self_attn.q_a_proj.weight",
    "self_attn.q_b_proj.weight",
    "self_attn.kv_a_proj_with_mqa.weight",
    "self_attn.f_a_proj.weight",
    "self_attn.f_b_proj.weight",
    "self_attn.b_proj.weight",
    "self_attn.g_proj.weight",
    "self_attn.kv_b_proj.weight",
    "self_attn.o_proj.weight",
    "block_sparse_moe.gate.weight",
    "block_sparse_moe.routed_expert_down_proj.weight",
    "block_sparse_moe.shared_experts.gate_proj.weight",
    "block_sparse_moe.shared_experts.up_proj.weight",
    "block_sparse_moe.shared_experts.down_proj.weight",
    "block_sparse_moe.routed_expert_up_proj.weight",
    "mlp.gate_proj.weight",
    "mlp.up_proj.weight",
    "mlp.down_proj.weight",
};
constexpr std::string_view kUsedWhole = "self_attn.kv_b_proj.weight";

bool is_vector(const TensorSpec& spec) { return spec.shape.size() != 2 || spec.shape[0] == 1; }

std::uint64_t widened_bytes(const TensorSpec& spec) {
    return spec.bytes() / storage::size_of(spec.dtype) * sizeof(float);
}

void add_layer(const ModelConfig& config, std::uint32_t layer, WeightPlan& plan) {
    const std::vector<TensorSpec> tensors = trunk_layer_tensors(config, layer);
    std::size_t n_matrices = 0;
    for (const TensorSpec& spec : tensors) {
        if (is_vector(spec))
            plan.vector_bytes += widened_bytes(spec);
        else
            ++n_matrices;
    }
    for (std::string_view rest : kOrder) {
        const std::string name = layer_tensor(layer, rest);
        const auto spec = std::find_if(tensors.begin(), tensors.end(),
                                       [&](const TensorSpec& t) { return t.name == name; });
        if (spec == tensors.end()) continue;
        plan.matrices.push_back({*spec, layer, false, rest == kUsedWhole});
        --n_matrices;
    }
    K3_CHECK(n_matrices == 0,
             fmt::format("layer {}: {} matrices without a place in the order", layer, n_matrices));
}

void add_head(const ModelConfig& config, WeightPlan& plan) {
    for (const TensorSpec& spec : model_level_tensors(config)) {
        if (spec.name == kHeadTensor)
            plan.matrices.push_back({spec, config.n_layers - 1, true, false});
        else if (spec.name != kEmbeddingTensor)
            plan.vector_bytes += widened_bytes(spec);
    }
}

/// Pieces of about the same size, in whole blocks of rows where there are enough of them.
void cut(std::uint64_t piece_bytes, WeightPlan& plan) {
    for (std::uint32_t m = 0; m < plan.matrices.size(); ++m) {
        const PlannedMatrix& matrix = plan.matrices[m];
        const std::uint64_t rows = matrix.spec.shape[0];
        const std::uint64_t row_bytes = matrix.row_bytes();
        std::uint64_t step = rows;
        if (!matrix.is_whole && rows * row_bytes > piece_bytes) {
            const std::uint64_t most = std::max<std::uint64_t>(1, piece_bytes / row_bytes);
            const std::uint64_t n = (rows + most - 1) / most;
            step = (rows + n - 1) / n;
            if (most >= kRowBlock)
                step = std::min((step + kRowBlock - 1) / kRowBlock, most / kRowBlock) * kRowBlock;
        }
        for (std::uint64_t first = 0; first < rows; first += step) {
            const std::uint64_t n = std::min(step, rows - first);
            plan.pieces.push_back({m, first, n, n * row_bytes, false});
        }
        if (!matrix.is_head) plan.n_layer_pieces = plan.pieces.size();
    }
}

/// Gives memory to pieces until it is used up.
class Keeper {
  public:
    Keeper(WeightPlan& plan, std::uint64_t room) : plan_(plan), room_(room) {}

    bool fits(std::uint64_t bytes) const { return bytes <= room_; }

    void keep(WeightPiece& piece) {
        const std::uint64_t bytes = memory_of(piece);
        if (piece.is_kept || !fits(bytes)) return;
        piece.is_kept = true;
        plan_.kept_bytes += bytes;
        room_ -= bytes;
    }

    /// Of pieces [first, last), as many as fit and none nearer to its neighbours than need be.
    void keep_evenly(std::size_t first, std::size_t last) {
        std::uint64_t wanted = 0;
        for (std::size_t i = first; i < last; ++i)
            if (!plan_.pieces[i].is_kept) wanted += memory_of(plan_.pieces[i]);
        if (wanted == 0) return;
        const double share =
            std::min(1.0, static_cast<double>(room_) / static_cast<double>(wanted));
        double due = 0;  // bytes that should have been kept so far, less those that are
        for (std::size_t i = first; i < last; ++i) {
            WeightPiece& piece = plan_.pieces[i];
            if (piece.is_kept) continue;
            const auto bytes = static_cast<double>(memory_of(piece));
            due += share * bytes;
            if (due < bytes) continue;
            keep(piece);
            if (piece.is_kept) due -= bytes;
        }
        for (std::size_t i = first; i < last; ++i) keep(plan_.pieces[i]);  // what rounding left
    }

  private:
    std::uint64_t memory_of(const WeightPiece& piece) const {
        return read_memory_bytes(piece.bytes, plan_.units.matrices);
    }

    WeightPlan& plan_;
    std::uint64_t room_;
};

/// What is more than `room` after the pieces would have been kept is read through the ring.
void keep_pieces(std::uint64_t room, WeightPlan& plan) {
    Keeper keeper(plan, room);
    for (WeightPiece& piece : plan.pieces)
        if (piece.bytes <= kSmallMatrix && plan.matrices[piece.matrix].spec.bytes() <= kSmallMatrix)
            keeper.keep(piece);
    keeper.keep_evenly(0, plan.n_layer_pieces);
    keeper.keep_evenly(plan.n_layer_pieces, plan.pieces.size());
}

}  // namespace

bool WeightPlan::keeps_all() const noexcept {
    return ring_bytes == 0 && (keeps_embedding || !has_embedding);
}

std::uint64_t WeightPlan::token_bytes(const ModelConfig& config) const noexcept {
    std::uint64_t bytes =
        has_embedding && !keeps_embedding
            ? std::uint64_t{config.hidden_size} * storage::size_of(storage::DType::bf16)
            : 0;
    for (const WeightPiece& piece : pieces)
        if (!piece.is_kept) bytes += piece.bytes;
    return bytes;
}

Result<WeightPlan> plan_weights(const ModelConfig& config, const WeightPlanOptions& options) {
    const std::uint32_t end = options.first_layer + options.n_layers;
    WeightPlan plan;
    plan.units = options.units;
    for (std::uint32_t layer = options.first_layer; layer < end; ++layer)
        add_layer(config, layer, plan);
    if (end == config.n_layers) add_head(config, plan);
    cut(options.piece_bytes, plan);

    plan.has_embedding = options.first_layer == 0;
    const std::uint64_t row_bytes =
        std::uint64_t{config.hidden_size} * storage::size_of(storage::DType::bf16);
    const std::uint64_t embedding =
        plan.has_embedding ? read_memory_bytes(config.vocab_size * row_bytes, plan.units.embedding)
                           : 0;
    const std::uint64_t rows =
        plan.has_embedding ? kEmbeddingRows * read_memory_bytes(row_bytes, plan.units.embedding)
                           : 0;

    std::uint64_t all_pieces = 0;
    std::uint64_t largest = 0;
    for (const WeightPiece& piece : plan.pieces) {
        const std::uint64_t bytes = read_memory_bytes(piece.bytes, plan.units.matrices);
        all_pieces += bytes;
        largest = std::max(largest, bytes);
    }
    const std::uint64_t ring_least = 2 * largest;
    const std::uint64_t everything = plan.vector_bytes + all_pieces + embedding;
    plan.smallest_bytes = std::min(plan.vector_bytes + ring_least + rows, everything);
    const std::uint64_t budget = options.budget_bytes;
    if (budget < plan.smallest_bytes)
        return Error{
            ErrorCode::invalid_argument,
            fmt::format("a budget of {} bytes for the weights of layers {}-{} is too small:"
                        " the smallest is {} bytes",
                        budget, options.first_layer, end - 1, plan.smallest_bytes),
            fmt::format("give at least --weights-bytes {}", plan.smallest_bytes)};

    plan.keeps_embedding = plan.has_embedding && budget >= everything;
    plan.embedding_bytes = plan.keeps_embedding ? embedding : rows;
    std::uint64_t room = budget - plan.vector_bytes - plan.embedding_bytes;
    if (room < all_pieces) {
        const std::uint64_t wanted = storage::block_floor(
            std::clamp(budget / 8, std::min(budget / 2, kGoodRingBytes), kMostRingBytes));
        plan.ring_bytes = std::min(std::max(wanted, ring_least), room);
        room -= plan.ring_bytes;
    }
    keep_pieces(room, plan);
    return plan;
}

}  // namespace k3::model
