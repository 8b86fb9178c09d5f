// The fingerprint of a checkpoint; what goes in is documented in tensor_names.h.

#include <fmt/format.h>
#include <xxhash.h>

#include <algorithm>
#include <bit>
#include <iterator>
#include <memory>
#include <vector>

#include "common/model/tensor_names.h"

namespace k3::model {

namespace {

constexpr std::uint64_t kSampleBytes = 4096;

struct FreeState {
    void operator()(XXH3_state_t* state) const noexcept { XXH3_freeState(state); }
};

class Digest {
  public:
    Digest() : state_(XXH3_createState()) { XXH3_128bits_reset(state_.get()); }

    void add(const void* data, std::size_t bytes) {
        XXH3_128bits_update(state_.get(), data, bytes);
    }
    void add(std::string_view text) { add(text.data(), text.size()); }
    std::string hex() const {
        XXH128_hash_t hash = XXH3_128bits_digest(state_.get());
        return fmt::format("{:016x}{:016x}", hash.high64, hash.low64);
    }

  private:
    std::unique_ptr<XXH3_state_t, FreeState> state_;
};

/// A float by its bits, so that no rounding of a printed form can hide a difference.
std::string bits(float value) { return fmt::format("{:08x}", std::bit_cast<std::uint32_t>(value)); }

std::string canonical_config(const ModelConfig& config) {
    std::string text;
    auto line = [&](std::string_view name, const auto& value) {
        fmt::format_to(std::back_inserter(text), "{}={}\n", name, value);
    };
    line("hidden_size", config.hidden_size);
    line("n_layers", config.n_layers);
    line("vocab_size", config.vocab_size);
    line("intermediate_size", config.intermediate_size);
    line("first_k_dense", config.first_k_dense);
    line("attn_res_block", config.attn_res_block);
    line("max_positions", config.max_positions);
    line("rms_norm_eps", bits(config.rms_norm_eps));
    line("situ_beta", bits(config.situ_beta));
    line("situ_linear_beta", bits(config.situ_linear_beta));
    line("bos_id", config.bos_id);
    line("eos_id", config.eos_id);
    line("pad_id", config.pad_id);
    line("media_placeholder_id", config.media_placeholder_id);
    line("kda.n_heads", config.kda.n_heads);
    line("kda.head_dim", config.kda.head_dim);
    line("kda.conv_kernel", config.kda.conv_kernel);
    line("kda.gate_lower_bound", bits(config.kda.gate_lower_bound));
    line("mla.n_heads", config.mla.n_heads);
    line("mla.q_lora_rank", config.mla.q_lora_rank);
    line("mla.kv_lora_rank", config.mla.kv_lora_rank);
    line("mla.qk_nope_head_dim", config.mla.qk_nope_head_dim);
    line("mla.qk_rope_head_dim", config.mla.qk_rope_head_dim);
    line("mla.v_head_dim", config.mla.v_head_dim);
    line("moe.n_experts", config.moe.n_experts);
    line("moe.top_k", config.moe.top_k);
    line("moe.latent_size", config.moe.latent_size);
    line("moe.moe_intermediate_size", config.moe.moe_intermediate_size);
    line("moe.n_shared_experts", config.moe.n_shared_experts);
    line("moe.latent_norm", config.moe.latent_norm ? 1 : 0);
    line("moe.renormalize", config.moe.renormalize ? 1 : 0);
    line("moe.scaling_factor", bits(config.moe.scaling_factor));
    std::string kinds;
    for (LayerKind kind : config.layer_kinds) kinds += kind == LayerKind::kda ? 'k' : 'm';
    line("layer_kinds", kinds);
    return text;
}

/// Up to 4 KiB from the middle of a tensor: its ends are more often padding or alike in two models
/// (the embedding's last rows belong to ids that never occur).
Status add_sample(Digest& digest, const storage::Checkpoint& checkpoint, std::string_view name) {
    const storage::TensorInfo* tensor = checkpoint.find(name);
    if (tensor == nullptr)
        return Error{ErrorCode::not_found,
                     fmt::format("{} lacks the tensor {}", checkpoint.directory().string(), name),
                     "check that the checkpoint is complete and that config.json belongs to it"};
    std::vector<std::byte> sample(std::min(kSampleBytes, tensor->bytes));
    std::uint64_t offset = tensor->offset + (tensor->bytes - sample.size()) / 2;
    Status status = checkpoint.read_range(tensor->shard, offset, sample);
    if (!status) return std::move(status).error().with_context(fmt::format("tensor {}", name));
    digest.add(sample.data(), sample.size());
    return Status::ok();
}

}  // namespace

std::string config_digest(const ModelConfig& config) {
    Digest digest;
    digest.add(canonical_config(config));
    return digest.hex();
}

Result<std::string> fingerprint(const storage::Checkpoint& checkpoint, const ModelConfig& config) {
    Digest digest;
    digest.add("k3 fingerprint 1\n");
    digest.add(canonical_config(config));
    std::string line;
    for (const storage::TensorInfo& tensor : checkpoint.tensors()) {
        line.assign(tensor.name);
        line += ' ';
        line += storage::to_string(tensor.dtype);
        for (std::uint64_t size : tensor.shape)
            fmt::format_to(std::back_inserter(line), " {}", size);
        line += '\n';
        digest.add(line);
    }
    for (std::uint32_t layer = 0; layer < config.n_layers; ++layer)
        RETURN_IF_ERROR(
            add_sample(digest, checkpoint, layer_tensor(layer, "self_attn.o_proj.weight")));
    RETURN_IF_ERROR(add_sample(digest, checkpoint, kEmbeddingTensor));
    RETURN_IF_ERROR(add_sample(digest, checkpoint, kHeadTensor));
    return digest.hex();
}

}  // namespace k3::model
