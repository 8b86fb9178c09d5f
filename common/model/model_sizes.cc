#include "common/model/model_sizes.h"

#include <functional>
#include <numeric>

#include "common/model/tensor_names.h"

namespace k3::model {

namespace {

PartSize size_of_tensor(const TensorSpec& tensor) {
    const std::uint64_t n = std::accumulate(tensor.shape.begin(), tensor.shape.end(),
                                            std::uint64_t{1}, std::multiplies<>());
    return {n, tensor.bytes()};
}

PartSize times(const PartSize& each, std::uint64_t n) {
    return {n * each.parameters, n * each.bytes};
}

/// Spec section 5.1, one expert: two codes to a byte, and a scale that is no parameter.
void add_expert(const ModelConfig& config, ModelSizes& sizes) {
    const auto parts = expert_tensors(config, config.first_k_dense, 0);
    const auto matrix = [&](ExpertPart packed, ExpertPart scale) {
        return PackedMatrixSize{parts[static_cast<std::size_t>(packed)].bytes(),
                                parts[static_cast<std::size_t>(scale)].bytes()};
    };
    sizes.w1 = matrix(ExpertPart::w1_packed, ExpertPart::w1_scale);
    sizes.w2 = matrix(ExpertPart::w2_packed, ExpertPart::w2_scale);
    sizes.w3 = matrix(ExpertPart::w3_packed, ExpertPart::w3_scale);
    for (const PackedMatrixSize& m : {sizes.w1, sizes.w2, sizes.w3})
        sizes.expert += {2 * m.packed, m.packed + m.scales};
    sizes.layer_experts = times(sizes.expert, config.moe.n_experts);
}

}  // namespace

PartSize TrunkLayerSize::moe() const noexcept {
    PartSize sum = shared;
    sum += latent;
    sum += router;
    return sum;
}

PartSize TrunkLayerSize::total() const noexcept {
    PartSize sum = moe();
    sum += attention;
    sum += dense;
    sum += vectors;
    return sum;
}

TrunkLayerSize trunk_layer_size(const ModelConfig& config, std::uint32_t layer) {
    const std::size_t prefix = layer_tensor(layer, "").size();
    TrunkLayerSize size;
    for (const TensorSpec& tensor : trunk_layer_tensors(config, layer)) {
        const std::string_view rest = std::string_view(tensor.name).substr(prefix);
        PartSize* part = &size.vectors;
        if (rest.starts_with("self_attn."))
            part = &size.attention;
        else if (rest.starts_with("mlp."))
            part = &size.dense;
        else if (rest.starts_with("block_sparse_moe.shared_experts."))
            part = &size.shared;
        else if (rest.starts_with("block_sparse_moe.routed_expert_"))
            part = &size.latent;
        else if (rest.starts_with("block_sparse_moe.gate."))
            part = &size.router;
        *part += size_of_tensor(tensor);
    }
    return size;
}

ModelSizes model_sizes(const ModelConfig& config) {
    ModelSizes sizes;
    add_expert(config, sizes);
    for (std::uint32_t layer = 0; layer < config.n_layers; ++layer) {
        const TrunkLayerSize size = trunk_layer_size(config, layer);
        const bool is_kda = config.layer_kinds[layer] == LayerKind::kda;
        ++(is_kda ? sizes.n_kda : sizes.n_mla);
        (is_kda ? sizes.kda : sizes.mla) += size.attention;
        sizes.dense += size.dense;
        sizes.shared += size.shared;
        sizes.latent += size.latent;
        sizes.router += size.router;
        sizes.vectors += size.vectors;
        sizes.trunk += size.total();
        if (config.is_moe(layer)) ++sizes.n_moe;
    }
    sizes.n_experts = std::uint64_t{sizes.n_moe} * config.moe.n_experts;
    sizes.all_experts = times(sizes.expert, sizes.n_experts);
    for (const TensorSpec& tensor : model_level_tensors(config)) {
        const PartSize size = size_of_tensor(tensor);
        if (tensor.name == kEmbeddingTensor) sizes.embedding = size;
        if (tensor.name == kHeadTensor) sizes.head = size;
        sizes.ends += size;
    }
    sizes.resident = sizes.trunk;
    sizes.resident += sizes.ends;
    sizes.text = sizes.resident;
    sizes.text += sizes.all_experts;

    sizes.picks = std::uint64_t{sizes.n_moe} * config.moe.top_k;
    sizes.picked_bytes = sizes.picks * sizes.expert.bytes;
    sizes.touched_bytes = sizes.trunk.bytes + sizes.picked_bytes + sizes.head.bytes;
    sizes.used_parameters = sizes.resident.parameters - sizes.embedding.parameters +
                            sizes.picks * sizes.expert.parameters;
    return sizes;
}

}  // namespace k3::model
