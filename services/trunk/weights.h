#pragma once
// The weights of a range of layers as a step sees them, and where they come from.
//
// Vectors always stay in memory. A matrix either does too, or it comes piece by piece, as many rows
// at a time as its source likes, while the step computes with it: products.h hides the difference.
// A step uses all matrices in one order, which is how such a source knows what to read next.
//
// Matrices stay as the checkpoint stores them (bf16): the kernels widen in registers. Vectors are
// widened to fp32 once. Two things are folded while loading: the query of each attention-residual
// site is norm weight times projection (spec section 3.3), and the decay's A_log becomes
// exp(A_log[head]), of which only the first n_heads entries mean anything (spec D3).

#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "common/base/result.h"
#include "common/kernels/kernel_table.h"
#include "common/model/config.h"
#include "common/storage/safetensors.h"

namespace k3::trunk {

using Vector = std::span<const float>;

/// A matrix of the trunk: in memory, or known to its source by a number.
struct Matrix {
    static constexpr std::uint32_t kInMemory = 0xFFFFFFFF;

    kernels::Matrix stored;  // without data if it is streamed
    std::uint32_t number = kInMemory;

    bool is_in_memory() const noexcept { return number == kInMemory; }
    std::size_t n_out() const noexcept { return stored.n_out; }
};

struct KdaWeights {
    Matrix q, k, v;                 // [width, hidden_size]
    Vector q_taps, k_taps, v_taps;  // [width, conv_kernel], oldest first
    Matrix f_a;                     // [head_dim, hidden_size], decay down
    Matrix f_b;                     // [width, head_dim], decay up
    Matrix b;                       // [n_heads, hidden_size], beta
    Matrix g;                       // [width, hidden_size], output gate
    Matrix o;                       // [hidden_size, width]
    Vector exp_a_log;               // [n_heads]
    Vector dt_bias;                 // [width]
    Vector o_norm;                  // [head_dim], shared by all heads
};

struct MlaWeights {
    Matrix q_a;       // [q_lora_rank, hidden_size]
    Vector q_a_norm;  // [q_lora_rank]
    Matrix q_b;       // [n_heads * (nope + rope), q_lora_rank]
    Matrix kv_a;      // [kv_lora_rank + rope, hidden_size]
    Vector kv_norm;   // [kv_lora_rank]
    Matrix kv_b;      // [n_heads * (nope + v), kv_lora_rank]; per head keys, then values
    Matrix g;         // [n_heads * v, hidden_size]
    Matrix o;         // [hidden_size, n_heads * v]
};

/// down(SiTU(gate x, up x)): dense layers and shared experts.
struct MlpWeights {
    Matrix gate, up;  // [width, hidden_size]
    Matrix down;      // [hidden_size, width]
};

struct MoeWeights {
    Matrix router;       // [n_experts, hidden_size]
    Vector router_bias;  // [n_experts], for the selection only
    Matrix latent_down;  // [latent_size, hidden_size]
    Vector latent_norm;  // [latent_size], of the aggregate; empty if the model has none
    Matrix latent_up;    // [hidden_size, latent_size]
    MlpWeights shared;   // all shared experts fused
};

struct LayerWeights {
    std::uint32_t layer = 0;
    model::LayerKind kind = model::LayerKind::kda;
    bool is_moe = false;
    Vector attn_query;  // [hidden_size], attention-residual query before attention
    Vector mlp_query;   // [hidden_size], and before the FFN
    Vector input_norm;  // [hidden_size]
    Vector post_norm;   // [hidden_size]
    KdaWeights kda;     // filled according to `kind`
    MlaWeights mla;
    MlpWeights dense;  // filled according to `is_moe`
    MoeWeights moe;
};

/// What follows the last layer.
struct HeadWeights {
    Vector query;    // [hidden_size], attention-residual query of the output
    Vector norm;     // [hidden_size]
    Matrix lm_head;  // [vocab_size, hidden_size]
};

class WeightSource;

/// Some consecutive rows of a matrix; their bytes stay where they are while this lives. Move-only.
class MatrixRows {
  public:
    /// `source` (null: none) is told when the rows are no longer used.
    MatrixRows(const kernels::Matrix& rows, std::size_t first, WeightSource* source) noexcept
        : rows_(rows), first_(first), source_(source) {}
    MatrixRows(MatrixRows&& other) noexcept
        : rows_(other.rows_),
          first_(other.first_),
          source_(std::exchange(other.source_, nullptr)) {}
    MatrixRows& operator=(MatrixRows&&) = delete;
    MatrixRows(const MatrixRows&) = delete;
    MatrixRows& operator=(const MatrixRows&) = delete;
    ~MatrixRows();

    const kernels::Matrix& rows() const noexcept { return rows_; }
    /// The first of them in the matrix.
    std::size_t first() const noexcept { return first_; }

  private:
    kernels::Matrix rows_;
    std::size_t first_;
    WeightSource* source_;
};

/// One thread asks.
class WeightSource {
  public:
    virtual ~WeightSource() = default;

    /// A step begins, at the first layer, whatever became of the one before. `wants_head`: it will
    /// use the output head.
    virtual void begin_step(bool wants_head) = 0;
    /// Stays valid as long as the source.
    virtual const LayerWeights& layer(std::uint32_t layer) const = 0;
    /// Last stage only.
    virtual const HeadWeights& head() const = 0;
    /// Writes row i of the embedding of tokens[i] to out + i * stride, widened. First stage only;
    /// tokens are below vocab_size. Errors: those of next_rows().
    virtual Status embed(std::span<const std::uint32_t> tokens, float* out, std::size_t stride) = 0;

    /// The next rows of a streamed matrix, the first ones at first, once they are there. Matrices
    /// come in the order of common/model/weight_plan.h, each once a step; one that is used as a
    /// whole comes in one piece. The rows of the call before must have been given back.
    /// Errors, naming matrix, file and offset: io, corrupt, cancelled.
    virtual Result<MatrixRows> next_rows(const Matrix& matrix) = 0;

    /// Held in memory, vectors included.
    virtual std::uint64_t bytes() const noexcept = 0;
    /// Brings the counters of reads up to date. Any thread.
    virtual void publish_counters() noexcept {}

  private:
    friend class MatrixRows;
    /// Those of the last next_rows().
    virtual void give_back() noexcept = 0;
};

inline MatrixRows::~MatrixRows() {
    if (source_ != nullptr) source_->give_back();
}

/// bf16 at any address to fp32; bytes.size() is 2 * out.size().
void widen_bf16(std::span<const std::byte> bytes, std::span<float> out) noexcept;

/// Called before each part ("layer 4") is loaded; false gives up.
using LoadProgress = std::function<bool(std::uint64_t done_bytes, std::uint64_t total_bytes,
                                        const std::string& what)>;

/// Reports before each part and adds its bytes after it.
class LoadReport {
  public:
    LoadReport(const LoadProgress& progress, std::uint64_t total_bytes)
        : progress_(progress), total_(total_bytes) {}

    /// Error: cancelled, if the caller gives up.
    Status begin(const std::string& what);
    void add(std::uint64_t bytes) noexcept { done_ += bytes; }

  private:
    const LoadProgress& progress_;
    std::uint64_t total_;
    std::uint64_t done_ = 0;
};

/// Owns the vectors that were widened while binding; spans into it stay valid while it lives.
class VectorStore {
  public:
    std::span<float> add(std::size_t n) { return vectors_.emplace_back(n); }
    std::size_t bytes() const noexcept;

  private:
    std::deque<std::vector<float>> vectors_;
};

/// Finds tensors that must have this type and shape.
class TensorFinder {
  public:
    virtual ~TensorFinder() = default;
    /// Its bytes, which outlive the binding, or its number.
    virtual Result<Matrix> matrix(const storage::TensorSpec& spec) = 0;
    /// Valid until the next call.
    virtual Result<std::span<const std::byte>> vector(const storage::TensorSpec& spec) = 0;
};

/// [vocab_size, hidden_size].
storage::TensorSpec embedding_spec(const model::ModelConfig& config);

/// Points the fields of a layer at its matrices and widens its vectors into `store`.
/// Errors: those of `tensors`.
Result<LayerWeights> bind_layer(const model::ModelConfig& config, std::uint32_t layer,
                                TensorFinder& tensors, VectorStore& store);
Result<HeadWeights> bind_head(const model::ModelConfig& config, TensorFinder& tensors,
                              VectorStore& store);

}  // namespace k3::trunk
