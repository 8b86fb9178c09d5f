#include "common/model/tensor_names.h"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

namespace k3::model {

namespace {

using storage::DType;
using Shape = std::vector<std::uint64_t>;

constexpr std::uint32_t kMxfp4Group = 32;  // columns under one scale byte

/// Collects the tensors of one layer under their short names.
class LayerTensors {
  public:
    explicit LayerTensors(std::uint32_t layer) : layer_(layer) {}

    void bf16(std::string_view rest, Shape shape) { add(rest, DType::bf16, std::move(shape)); }
    void f32(std::string_view rest, Shape shape) { add(rest, DType::f32, std::move(shape)); }
    std::vector<TensorSpec> take() { return std::move(tensors_); }

  private:
    void add(std::string_view rest, DType dtype, Shape shape) {
        tensors_.push_back({layer_tensor(layer_, rest), dtype, std::move(shape)});
    }

    std::uint32_t layer_;
    std::vector<TensorSpec> tensors_;
};

void add_kda(LayerTensors& tensors, const ModelConfig& config) {
    const std::uint64_t hidden = config.hidden_size;
    const std::uint64_t width = config.kda.width();
    const std::uint64_t head_dim = config.kda.head_dim;
    for (const char* name : {"q", "k", "v"})
        tensors.bf16(fmt::format("self_attn.{}_proj.weight", name), {width, hidden});
    for (const char* name : {"q", "k", "v"})
        tensors.f32(fmt::format("self_attn.{}_conv1d.weight", name),
                    {width, 1, config.kda.conv_kernel});
    tensors.bf16("self_attn.f_a_proj.weight", {head_dim, hidden});
    tensors.bf16("self_attn.f_b_proj.weight", {width, head_dim});
    tensors.bf16("self_attn.b_proj.weight", {config.kda.n_heads, hidden});
    // One value per head, padded to head_dim entries: the rest must not be used.
    tensors.f32("self_attn.A_log", {head_dim});
    tensors.f32("self_attn.dt_bias", {width});
    tensors.f32("self_attn.o_norm.weight", {head_dim});
}

void add_mla(LayerTensors& tensors, const ModelConfig& config) {
    const std::uint64_t hidden = config.hidden_size;
    const MlaConfig& mla = config.mla;
    const std::uint64_t heads = mla.n_heads;
    tensors.bf16("self_attn.q_a_proj.weight", {mla.q_lora_rank, hidden});
    tensors.bf16("self_attn.q_a_layernorm.weight", {mla.q_lora_rank});
    tensors.bf16("self_attn.q_b_proj.weight",
                 {heads * (mla.qk_nope_head_dim + mla.qk_rope_head_dim), mla.q_lora_rank});
    tensors.bf16("self_attn.kv_a_proj_with_mqa.weight",
                 {std::uint64_t{mla.kv_lora_rank} + mla.qk_rope_head_dim, hidden});
    tensors.bf16("self_attn.kv_a_layernorm.weight", {mla.kv_lora_rank});
    tensors.bf16("self_attn.kv_b_proj.weight",
                 {heads * (mla.qk_nope_head_dim + mla.v_head_dim), mla.kv_lora_rank});
}

void add_dense(LayerTensors& tensors, const ModelConfig& config) {
    tensors.bf16("mlp.gate_proj.weight", {config.intermediate_size, config.hidden_size});
    tensors.bf16("mlp.up_proj.weight", {config.intermediate_size, config.hidden_size});
    tensors.bf16("mlp.down_proj.weight", {config.hidden_size, config.intermediate_size});
}

void add_moe(LayerTensors& tensors, const ModelConfig& config) {
    const std::uint64_t hidden = config.hidden_size;
    const std::uint64_t latent = config.moe.latent_size;
    const std::uint64_t shared = config.moe.shared_width();
    tensors.bf16("block_sparse_moe.gate.weight", {config.moe.n_experts, hidden});
    tensors.f32("block_sparse_moe.gate.e_score_correction_bias", {config.moe.n_experts});
    tensors.bf16("block_sparse_moe.routed_expert_down_proj.weight", {latent, hidden});
    if (config.moe.latent_norm)
        tensors.bf16("block_sparse_moe.routed_expert_norm.weight", {latent});
    tensors.bf16("block_sparse_moe.routed_expert_up_proj.weight", {hidden, latent});
    tensors.bf16("block_sparse_moe.shared_experts.gate_proj.weight", {shared, hidden});
    tensors.bf16("block_sparse_moe.shared_experts.up_proj.weight", {shared, hidden});
    tensors.bf16("block_sparse_moe.shared_experts.down_proj.weight", {hidden, shared});
}

/// Problems of one kind, of which the first three are named.
class Problems {
  public:
    void add(std::string text) {
        if (n_++ < 3) first_ += (first_.empty() ? "" : ", ") + std::move(text);
    }
    std::size_t count() const noexcept { return n_; }
    std::string text() const { return n_ > 3 ? first_ + ", ..." : first_; }

  private:
    std::size_t n_ = 0;
    std::string first_;
};

/// Looks tensors up one by one and reports what it found in one sentence.
class TensorCheck {
  public:
    explicit TensorCheck(const storage::Checkpoint& checkpoint) : checkpoint_(checkpoint) {}

    void look(std::span<const TensorSpec> specs) {
        for (const TensorSpec& spec : specs) {
            const storage::TensorInfo* tensor = checkpoint_.find(spec.name);
            ++n_looked_;
            if (tensor == nullptr)
                absent_.add(spec.name);
            else if (tensor->dtype != spec.dtype || !storage::same_shape(tensor->shape, spec.shape))
                different_.add(fmt::format(
                    "{} (is {} {}, config.json calls for {} {})", spec.name,
                    storage::to_string(tensor->dtype), storage::to_string(tensor->shape),
                    storage::to_string(spec.dtype), storage::to_string(spec.shape)));
        }
    }

    Status result() const {
        const std::string where = checkpoint_.directory().string();
        if (absent_.count() > 0)
            return Error{
                ErrorCode::not_found,
                fmt::format("{} lacks {} of {} needed tensors: {}", where, absent_.count(),
                            n_looked_, absent_.text()),
                "check that the checkpoint is complete and that config.json belongs to it"};
        if (different_.count() > 0)
            return Error{ErrorCode::incompatible,
                         fmt::format("{}: {} of {} tensors have another type or shape: {}", where,
                                     different_.count(), n_looked_, different_.text()),
                         "use config.json and shards of the same release"};
        return Status::ok();
    }

  private:
    const storage::Checkpoint& checkpoint_;
    std::size_t n_looked_ = 0;
    Problems absent_;
    Problems different_;
};

}  // namespace

std::string layer_tensor(std::uint32_t layer, std::string_view rest) {
    return fmt::format("language_model.model.layers.{}.{}", layer, rest);
}

std::vector<TensorSpec> trunk_layer_tensors(const ModelConfig& config, std::uint32_t layer) {
    const std::uint64_t hidden = config.hidden_size;
    const bool is_kda = config.layer_kinds[layer] == LayerKind::kda;
    const std::uint64_t width = is_kda ? config.kda.width() : config.mla.width();
    LayerTensors tensors(layer);
    tensors.bf16("input_layernorm.weight", {hidden});
    tensors.bf16("post_attention_layernorm.weight", {hidden});
    // Also in layer 0, which never uses its self_attention_res tensors.
    tensors.bf16("self_attention_res_norm.weight", {hidden});
    tensors.bf16("self_attention_res_proj.weight", {1, hidden});
    tensors.bf16("mlp_res_norm.weight", {hidden});
    tensors.bf16("mlp_res_proj.weight", {1, hidden});
    tensors.bf16("self_attn.g_proj.weight", {width, hidden});
    tensors.bf16("self_attn.o_proj.weight", {hidden, width});
    if (is_kda)
        add_kda(tensors, config);
    else
        add_mla(tensors, config);
    if (config.is_moe(layer))
        add_moe(tensors, config);
    else
        add_dense(tensors, config);
    return tensors.take();
}

std::vector<TensorSpec> model_level_tensors(const ModelConfig& config) {
    const std::uint64_t hidden = config.hidden_size;
    const std::uint64_t vocab = config.vocab_size;
    return {{std::string(kEmbeddingTensor), DType::bf16, {vocab, hidden}},
            {"language_model.model.norm.weight", DType::bf16, {hidden}},
            {"language_model.model.output_attn_res_norm.weight", DType::bf16, {hidden}},
            {"language_model.model.output_attn_res_proj.weight", DType::bf16, {1, hidden}},
            {std::string(kHeadTensor), DType::bf16, {vocab, hidden}}};
}

std::array<TensorSpec, 6> expert_tensors(const ModelConfig& config, std::uint32_t layer,
                                         std::uint32_t expert) {
    const std::uint64_t latent = config.moe.latent_size;
    const std::uint64_t inner = config.moe.moe_intermediate_size;
    const std::string prefix =
        layer_tensor(layer, fmt::format("block_sparse_moe.experts.{}.", expert));
    auto spec = [&](const char* rest, std::uint64_t rows, std::uint64_t columns) {
        return TensorSpec{prefix + rest, DType::u8, {rows, columns}};
    };
    return {spec("w1.weight_packed", inner, latent / 2),
            spec("w1.weight_scale", inner, latent / kMxfp4Group),
            spec("w2.weight_packed", latent, inner / 2),
            spec("w2.weight_scale", latent, inner / kMxfp4Group),
            spec("w3.weight_packed", inner, latent / 2),
            spec("w3.weight_scale", inner, latent / kMxfp4Group)};
}

std::uint64_t expert_bytes(const ModelConfig& config) noexcept {
    const std::uint64_t weights =
        std::uint64_t{3} * config.moe.latent_size * config.moe.moe_intermediate_size;
    return weights / 2 + weights / kMxfp4Group;
}

Status check_trunk_tensors(const storage::Checkpoint& checkpoint, const ModelConfig& config,
                           std::uint32_t first, std::uint32_t count) {
    TensorCheck check(checkpoint);
    for (std::uint32_t layer = first; layer < first + count; ++layer)
        check.look(trunk_layer_tensors(config, layer));
    check.look(model_level_tensors(config));
    return check.result();
}

Status check_expert_tensors(const storage::Checkpoint& checkpoint, const ModelConfig& config,
                            std::uint32_t first, std::uint32_t count) {
    TensorCheck check(checkpoint);
    for (std::uint32_t layer = first; layer < first + count; ++layer)
        for (std::uint32_t e = 0; config.is_moe(layer) && e < config.moe.n_experts; ++e)
            check.look(expert_tensors(config, layer, e));
    return check.result();
}

}  // namespace k3::model
