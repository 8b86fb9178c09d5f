#pragma once
// What a trunk stage keeps in memory and what it reads again for every token.
//
// A step uses the matrices of a stage one after the other, always in the same order, and returns to
// the first with the next token. So whatever is not kept can be read ahead through a ring without
// guessing. This file decides, from config and budget alone, what is kept: the engine follows the
// plan, and whoever asks what a budget would cost gets the same bytes.
//
// Matrices are cut into pieces of consecutive rows (a product's rows do not depend on each other).
// In memory, first to last:
// - norms, taps and biases, widened, always: 0.1 % of the bytes, and most of the small reads;
// - the ring, an eighth of the budget, but at most 512 MiB and, out of half of the budget, at least
//   256 MiB; two pieces in any case. It has to cover the moments in which a step does not use new
//   pieces (attention, waiting for experts, other work on the box); with two pieces the device was
//   idle a fifth of the time on a loaded machine. What is more than that saves reads only as kept
//   pieces;
// - pieces of small matrices, as each saves a request too;
// - pieces of layers: every byte kept is a byte less to read for each token. They are spread evenly
//   over the order of a step. A kept prefix of the same size would save as much, but while a step
//   computes with it a ring that is smaller than what arrives meanwhile would be full, and the
//   device would pause;
// - pieces of the head, which only steps that want logits read;
// - the embedding: 2.35 GB as released, of which a token needs 14 KiB.

#include <cstdint>
#include <vector>

#include "common/base/result.h"
#include "common/model/config.h"
#include "common/model/tensor_names.h"
#include "common/storage/direct_file.h"

namespace k3::model {

struct PlannedMatrix {
    TensorSpec spec;  // [rows, columns]
    std::uint32_t layer = 0;
    bool is_head = false;
    bool is_whole = false;  // used by all heads at once: never cut

    std::uint64_t row_bytes() const noexcept { return spec.bytes() / spec.shape[0]; }
};

/// Consecutive rows of a matrix, read and kept as one.
struct WeightPiece {
    std::uint32_t matrix = 0;  // index into the plan's matrices
    std::uint64_t first_row = 0;
    std::uint64_t n_rows = 0;
    std::uint64_t bytes = 0;
    bool is_kept = false;
};

/// The least that is read at a time, where the weights lie: a block of a checkpoint's shards, or as
/// much of a pack as has a checksum.
struct ReadUnits {
    std::uint64_t matrices = storage::kBlockBytes;
    std::uint64_t embedding = storage::kBlockBytes;
};

struct WeightPlan {
    ReadUnits units;
    std::vector<PlannedMatrix> matrices;  // in the order of a step, the head last
    std::vector<WeightPiece> pieces;      // in the same order
    std::size_t n_layer_pieces = 0;       // the others are the head's
    bool has_embedding = false;
    bool keeps_embedding = false;

    // Memory, whole units of reads included.
    std::uint64_t vector_bytes = 0;
    std::uint64_t ring_bytes = 0;       // 0: nothing is read again
    std::uint64_t kept_bytes = 0;       // of pieces
    std::uint64_t embedding_bytes = 0;  // all of it, or room for kEmbeddingRows rows
    std::uint64_t smallest_bytes = 0;   // the smallest budget for this stage

    std::uint64_t memory_bytes() const noexcept {
        return vector_bytes + ring_bytes + kept_bytes + embedding_bytes;
    }
    bool keeps_all() const noexcept;
    /// Weights that a step of one row reads again if it wants logits: token_cost().trunk_bytes less
    /// what is kept, if the stage holds all layers. Reads take at most two units more for each
    /// piece.
    std::uint64_t token_bytes(const ModelConfig& config) const noexcept;
};

struct WeightPlanOptions {
    std::uint32_t first_layer = 0;
    std::uint32_t n_layers = 0;
    std::uint64_t budget_bytes = 0;
    std::uint64_t piece_bytes = std::uint64_t{32}
                                << 20;  // most of a piece, unless one row has more
    ReadUnits units = {};
};

/// Rows of the embedding that are read at the same time.
inline constexpr std::uint64_t kEmbeddingRows = 32;

/// Memory for `bytes` at any place, read in whole units.
constexpr std::uint64_t read_memory_bytes(std::uint64_t bytes, std::uint64_t unit) noexcept {
    return (bytes + unit - 1) / unit * unit + unit;
}

/// Error: invalid_argument if the budget is below the smallest (both numbers).
Result<WeightPlan> plan_weights(const ModelConfig& config, const WeightPlanOptions& options);

}  // namespace k3::model
