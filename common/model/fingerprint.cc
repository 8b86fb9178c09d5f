// The fingerprint of a checkpoint; what goes in is documented in tensor_names.h.

#include <fmt/format.h>
#include <xxhash.h>

#include <algorithm>
#include <bit>
#include <iterator>
#include <map>
#include <memory>
#include <vector>

#include "common/model/tensor_names.h"
#include "common/storage/file.h"
#include "common/storage/shard_headers.h"

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

/// Of tensors, in any order.
class TensorSum {
  public:
    void add(const storage::TensorInfo& tensor) {
        line_.assign(tensor.name);
        line_ += ' ';
        line_ += storage::to_string(tensor.dtype);
        for (std::uint64_t size : tensor.shape)
            fmt::format_to(std::back_inserter(line_), " {}", size);
        line_ += '\n';
        const XXH128_hash_t hash = XXH3_128bits(line_.data(), line_.size());
        low_ += hash.low64;
        high_ += hash.high64 + (low_ < hash.low64 ? 1 : 0);
    }
    std::string hex() const { return fmt::format("{:016x}{:016x}", high_, low_); }

  private:
    std::string line_;
    std::uint64_t low_ = 0;
    std::uint64_t high_ = 0;
};

using Sample = std::vector<std::byte>;

/// Tensors of which a part goes in, in this order.
std::vector<std::string> sampled_tensors(const ModelConfig& config) {
    std::vector<std::string> names;
    for (std::uint32_t layer = 0; layer < config.n_layers; ++layer)
        names.push_back(layer_tensor(layer, "self_attn.o_proj.weight"));
    names.emplace_back(kEmbeddingTensor);
    names.emplace_back(kHeadTensor);
    return names;
}

/// Up to 4 KiB from the middle of a tensor: its ends are more often padding or alike in two models
/// (the embedding's last rows belong to ids that never occur).
struct SamplePlace {
    std::uint64_t offset = 0;
    std::size_t bytes = 0;

    explicit SamplePlace(const storage::TensorInfo& tensor)
        : bytes(std::min(kSampleBytes, tensor.bytes)) {
        offset = tensor.offset + (tensor.bytes - bytes) / 2;
    }
};

Error lacks(const std::filesystem::path& directory, std::string_view name) {
    return Error{ErrorCode::not_found,
                 fmt::format("{} lacks the tensor {}", directory.string(), name),
                 "check that the checkpoint is complete and that config.json belongs to it"};
}

std::string digest_of(const ModelConfig& config, const TensorSum& tensors,
                      const std::vector<Sample>& samples) {
    Digest digest;
    digest.add("k3 fingerprint 2\n");
    digest.add(canonical_config(config));
    digest.add(tensors.hex());
    for (const Sample& sample : samples) digest.add(sample.data(), sample.size());
    return digest.hex();
}

}  // namespace

std::string config_digest(const ModelConfig& config) {
    Digest digest;
    digest.add(canonical_config(config));
    return digest.hex();
}

Result<std::string> fingerprint(const storage::Checkpoint& checkpoint, const ModelConfig& config) {
    TensorSum sum;
    for (const storage::TensorInfo& tensor : checkpoint.tensors()) sum.add(tensor);
    std::vector<Sample> samples;
    for (const std::string& name : sampled_tensors(config)) {
        const storage::TensorInfo* tensor = checkpoint.find(name);
        if (tensor == nullptr) return lacks(checkpoint.directory(), name);
        const SamplePlace place(*tensor);
        Status read =
            checkpoint.read_range(tensor->shard, place.offset, samples.emplace_back(place.bytes));
        if (!read) return std::move(read).error().with_context(fmt::format("tensor {}", name));
    }
    return digest_of(config, sum, samples);
}

Result<std::string> fingerprint(const std::filesystem::path& directory, const ModelConfig& config) {
    TensorSum sum;
    const std::vector<std::string> names = sampled_tensors(config);
    std::map<std::string_view, std::size_t> wanted;
    for (std::size_t i = 0; i < names.size(); ++i) wanted.emplace(names[i], i);
    std::vector<Sample> samples(names.size());
    std::vector<bool> found(names.size());
    const std::vector<std::string> skipped = storage::vision_prefixes();
    RETURN_IF_ERROR(
        storage::visit_shards(directory, skipped, [&](const storage::ShardHeader& shard) -> Status {
            for (const storage::TensorInfo& tensor : shard.tensors) {
                sum.add(tensor);
                const auto at = wanted.find(tensor.name);
                if (at == wanted.end()) continue;
                const SamplePlace place(tensor);
                Sample& sample = samples[at->second];
                sample.resize(place.bytes);
                Status read =
                    storage::read_exactly(shard.fd, place.offset, std::span(sample), shard.path);
                if (!read)
                    return std::move(read).error().with_context(
                        fmt::format("tensor {}", tensor.name));
                found[at->second] = true;
            }
            return Status::ok();
        }));
    for (std::size_t i = 0; i < names.size(); ++i)
        if (!found[i]) return lacks(directory, names[i]);
    return digest_of(config, sum, samples);
}

}  // namespace k3::model
