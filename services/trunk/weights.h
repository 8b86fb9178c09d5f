#pragma once
// The weights of a range of layers as a step sees them, and where they come from.
//
// A step asks for one layer after the other and holds a lease on the one it computes with. Today
// every layer stays in memory (ram_weights.h); a source that streams layers through a ring of
// slots has the same interface, which is why nobody keeps a LayerWeights beyond its lease.
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

using kernels::Matrix;
using Vector = std::span<const float>;

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

/// The right to read one layer's weights; a streaming source does not reuse the slot while this
/// lives. Move-only.
class LayerLease {
  public:
    explicit LayerLease(const LayerWeights& weights, std::function<void()> release = nullptr)
        : weights_(&weights), release_(std::move(release)) {}
    LayerLease(LayerLease&& other) noexcept
        : weights_(std::exchange(other.weights_, nullptr)),
          release_(std::exchange(other.release_, nullptr)) {}
    LayerLease& operator=(LayerLease&&) = delete;
    LayerLease(const LayerLease&) = delete;
    LayerLease& operator=(const LayerLease&) = delete;
    ~LayerLease() {
        if (release_) release_();
    }

    const LayerWeights& operator*() const noexcept { return *weights_; }
    const LayerWeights* operator->() const noexcept { return weights_; }

  private:
    const LayerWeights* weights_;
    std::function<void()> release_;
};

/// One thread asks, in the order of the layers.
class WeightSource {
  public:
    virtual ~WeightSource() = default;

    /// Waits until the layer is there. Errors of a source that reads: io, corrupt.
    virtual Result<LayerLease> layer(std::uint32_t layer) = 0;
    /// Writes row i of the embedding of tokens[i] to out + i * stride, widened. First stage only;
    /// tokens are below vocab_size.
    virtual Status embed(std::span<const std::uint32_t> tokens, float* out, std::size_t stride) = 0;
    /// Last stage only.
    virtual Result<const HeadWeights*> head() = 0;
};

/// Owns the vectors that were widened while binding; spans into it stay valid while it lives.
class VectorStore {
  public:
    std::span<float> add(std::size_t n) { return vectors_.emplace_back(n); }
    std::size_t bytes() const noexcept;

  private:
    std::deque<std::vector<float>> vectors_;
};

/// Finds the bytes of a tensor that must have this type and shape; they outlive the binding.
using TensorBytes = std::function<Result<const std::byte*>(
    const std::string& name, storage::DType dtype, std::span<const std::uint64_t> shape)>;

/// Points the fields of a layer at its tensors and widens its vectors into `store`.
/// Errors: those of `bytes`.
Result<LayerWeights> bind_layer(const model::ModelConfig& config, std::uint32_t layer,
                                const TensorBytes& bytes, VectorStore& store);
Result<HeadWeights> bind_head(const model::ModelConfig& config, const TensorBytes& bytes,
                              VectorStore& store);

}  // namespace k3::trunk
