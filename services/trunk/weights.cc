#include "services/trunk/weights.h"

#include <bit>
#include <cstring>
#include <string_view>

#include "common/kernels/math.h"
#include "common/model/tensor_names.h"

namespace k3::trunk {

namespace {

using storage::DType;

/// Binds tensors one by one and remembers the first error, so that a list of fields reads as one.
class Binder {
  public:
    Binder(TensorFinder& tensors, VectorStore& store, std::string prefix)
        : tensors_(tensors), store_(store), prefix_(std::move(prefix)) {}

    Matrix matrix(std::string_view rest, std::uint64_t n_out, std::uint64_t n_in) {
        if (!status_.has_value()) return {};
        Result<Matrix> found = tensors_.matrix(spec(rest, DType::bf16, {n_out, n_in}));
        if (found.has_value()) return *found;
        status_ = std::move(found).error();
        return {};
    }

    /// A bf16 tensor widened exactly: its bits are the upper half of the fp32 value.
    std::span<float> bf16_vector(std::string_view rest, const std::vector<std::uint64_t>& shape) {
        std::span<float> out = store_.add(shape.back());
        const std::span<const std::byte> bytes = vector(spec(rest, DType::bf16, shape));
        if (!bytes.empty()) widen_bf16(bytes, out);
        return out;
    }

    std::span<float> f32_vector(std::string_view rest, const std::vector<std::uint64_t>& shape) {
        std::size_t n = 1;
        for (std::uint64_t length : shape) n *= length;
        std::span<float> out = store_.add(n);
        const std::span<const std::byte> bytes = vector(spec(rest, DType::f32, shape));
        if (!bytes.empty()) std::memcpy(out.data(), bytes.data(), bytes.size());
        return out;
    }

    /// norm weight times projection. Spec section 3.3: q = g * w, folded once.
    Vector residual_query(const std::string& site, std::uint64_t hidden) {
        std::span<float> query = bf16_vector(site + "_norm.weight", {hidden});
        std::span<float> projection = bf16_vector(site + "_proj.weight", {1, hidden});
        for (std::size_t i = 0; i < query.size(); ++i) query[i] *= projection[i];
        return query;
    }

    Status status() && { return std::move(status_); }

  private:
    storage::TensorSpec spec(std::string_view rest, DType dtype,
                             std::vector<std::uint64_t> shape) const {
        return {prefix_ + std::string(rest), dtype, std::move(shape)};
    }

    std::span<const std::byte> vector(const storage::TensorSpec& spec) {
        if (!status_.has_value()) return {};
        Result<std::span<const std::byte>> found = tensors_.vector(spec);
        if (found.has_value()) return *found;
        status_ = std::move(found).error();
        return {};
    }

    TensorFinder& tensors_;
    VectorStore& store_;
    std::string prefix_;
    Status status_;
};

KdaWeights bind_kda(Binder& bind, const model::KdaConfig& kda, std::uint64_t hidden) {
    const std::uint64_t width = kda.width();
    const std::vector<std::uint64_t> taps = {width, 1, kda.conv_kernel};
    KdaWeights w;
    w.q = bind.matrix("self_attn.q_proj.weight", width, hidden);
    w.k = bind.matrix("self_attn.k_proj.weight", width, hidden);
    w.v = bind.matrix("self_attn.v_proj.weight", width, hidden);
    w.q_taps = bind.f32_vector("self_attn.q_conv1d.weight", taps);
    w.k_taps = bind.f32_vector("self_attn.k_conv1d.weight", taps);
    w.v_taps = bind.f32_vector("self_attn.v_conv1d.weight", taps);
    w.f_a = bind.matrix("self_attn.f_a_proj.weight", kda.head_dim, hidden);
    w.f_b = bind.matrix("self_attn.f_b_proj.weight", width, kda.head_dim);
    w.b = bind.matrix("self_attn.b_proj.weight", kda.n_heads, hidden);
    w.g = bind.matrix("self_attn.g_proj.weight", width, hidden);
    w.o = bind.matrix("self_attn.o_proj.weight", hidden, width);
    // Stored with head_dim entries, one per head meaningful, the rest padding (spec D3).
    std::span<float> a_log = bind.f32_vector("self_attn.A_log", {kda.head_dim});
    for (float& value : a_log.first(kda.n_heads)) value = kernels::exp_f32(value);
    w.exp_a_log = a_log.first(kda.n_heads);
    w.dt_bias = bind.f32_vector("self_attn.dt_bias", {width});
    w.o_norm = bind.f32_vector("self_attn.o_norm.weight", {kda.head_dim});
    return w;
}

MlaWeights bind_mla(Binder& bind, const model::MlaConfig& mla, std::uint64_t hidden) {
    const std::uint64_t heads = mla.n_heads;
    const std::uint64_t q_dim = mla.qk_nope_head_dim + mla.qk_rope_head_dim;
    const std::uint64_t kv_dim = mla.qk_nope_head_dim + mla.v_head_dim;
    MlaWeights w;
    w.q_a = bind.matrix("self_attn.q_a_proj.weight", mla.q_lora_rank, hidden);
    w.q_a_norm = bind.bf16_vector("self_attn.q_a_layernorm.weight", {mla.q_lora_rank});
    w.q_b = bind.matrix("self_attn.q_b_proj.weight", heads * q_dim, mla.q_lora_rank);
    w.kv_a = bind.matrix("self_attn.kv_a_proj_with_mqa.weight",
                         mla.kv_lora_rank + mla.qk_rope_head_dim, hidden);
    w.kv_norm = bind.bf16_vector("self_attn.kv_a_layernorm.weight", {mla.kv_lora_rank});
    w.kv_b = bind.matrix("self_attn.kv_b_proj.weight", heads * kv_dim, mla.kv_lora_rank);
    w.g = bind.matrix("self_attn.g_proj.weight", mla.width(), hidden);
    w.o = bind.matrix("self_attn.o_proj.weight", hidden, mla.width());
    return w;
}

MlpWeights bind_mlp(Binder& bind, const std::string& prefix, std::uint64_t width,
                    std::uint64_t hidden) {
    MlpWeights w;
    w.gate = bind.matrix(prefix + ".gate_proj.weight", width, hidden);
    w.up = bind.matrix(prefix + ".up_proj.weight", width, hidden);
    w.down = bind.matrix(prefix + ".down_proj.weight", hidden, width);
    return w;
}

MoeWeights bind_moe(Binder& bind, const model::MoeConfig& moe, std::uint64_t hidden) {
    const std::string prefix = "block_sparse_moe.";
    MoeWeights w;
    w.router = bind.matrix(prefix + "gate.weight", moe.n_experts, hidden);
    w.router_bias = bind.f32_vector(prefix + "gate.e_score_correction_bias", {moe.n_experts});
    w.latent_down = bind.matrix(prefix + "routed_expert_down_proj.weight", moe.latent_size, hidden);
    if (moe.latent_norm)
        w.latent_norm = bind.bf16_vector(prefix + "routed_expert_norm.weight", {moe.latent_size});
    w.latent_up = bind.matrix(prefix + "routed_expert_up_proj.weight", hidden, moe.latent_size);
    w.shared = bind_mlp(bind, prefix + "shared_experts", moe.shared_width(), hidden);
    return w;
}

}  // namespace

void widen_bf16(std::span<const std::byte> bytes, std::span<float> out) noexcept {
    for (std::size_t i = 0; i < out.size(); ++i) {
        std::uint16_t bits = 0;
        std::memcpy(&bits, bytes.data() + i * sizeof(bits), sizeof(bits));
        out[i] = std::bit_cast<float>(std::uint32_t{bits} << 16U);
    }
}

Status LoadReport::begin(const std::string& what) {
    if (!progress_ || progress_(done_, total_, what)) return Status::ok();
    return Error{ErrorCode::cancelled, "loading stopped before " + what, ""};
}

storage::TensorSpec embedding_spec(const model::ModelConfig& config) {
    return {
        std::string(model::kEmbeddingTensor), DType::bf16, {config.vocab_size, config.hidden_size}};
}

std::size_t VectorStore::bytes() const noexcept {
    std::size_t total = 0;
    for (const auto& vector : vectors_) total += vector.size() * sizeof(float);
    return total;
}

Result<LayerWeights> bind_layer(const model::ModelConfig& config, std::uint32_t layer,
                                TensorFinder& tensors, VectorStore& store) {
    const std::uint64_t hidden = config.hidden_size;
    Binder bind(tensors, store, model::layer_tensor(layer, ""));
    LayerWeights w;
    w.layer = layer;
    w.kind = config.layer_kinds[layer];
    w.is_moe = config.is_moe(layer);
    w.attn_query = bind.residual_query("self_attention_res", hidden);
    w.mlp_query = bind.residual_query("mlp_res", hidden);
    w.input_norm = bind.bf16_vector("input_layernorm.weight", {hidden});
    w.post_norm = bind.bf16_vector("post_attention_layernorm.weight", {hidden});
    if (w.kind == model::LayerKind::kda)
        w.kda = bind_kda(bind, config.kda, hidden);
    else
        w.mla = bind_mla(bind, config.mla, hidden);
    if (w.is_moe)
        w.moe = bind_moe(bind, config.moe, hidden);
    else
        w.dense = bind_mlp(bind, "mlp", config.intermediate_size, hidden);
    RETURN_IF_ERROR(std::move(bind).status());
    return w;
}

Result<HeadWeights> bind_head(const model::ModelConfig& config, TensorFinder& tensors,
                              VectorStore& store) {
    const std::uint64_t hidden = config.hidden_size;
    Binder bind(tensors, store, "language_model.");
    HeadWeights w;
    w.query = bind.residual_query("model.output_attn_res", hidden);
    w.norm = bind.bf16_vector("model.norm.weight", {hidden});
    w.lm_head = bind.matrix("lm_head.weight", config.vocab_size, hidden);
    RETURN_IF_ERROR(std::move(bind).status());
    return w;
}

}  // namespace k3::trunk
