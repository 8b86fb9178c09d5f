#include "common/model/token_cost.h"

#include "common/model/tensor_names.h"

namespace k3::model {

namespace {

std::uint64_t elements(const TensorSpec& tensor) {
    std::uint64_t n = 1;
    for (std::uint64_t size : tensor.shape) n *= size;
    return n;
}

}  // namespace

TokenCost token_cost(const ModelConfig& config) {
    TokenCost cost;
    for (std::uint32_t layer = 0; layer < config.n_layers; ++layer) {
        for (const TensorSpec& tensor : trunk_layer_tensors(config, layer)) {
            cost.trunk_bytes += tensor.bytes();
            if (tensor.shape.size() == 2) cost.row_flops += 2 * elements(tensor);
        }
        if (!config.is_moe(layer)) continue;
        cost.expert_bytes += config.moe.top_k * expert_bytes(config);
        cost.row_flops += std::uint64_t{2} * 3 * config.moe.top_k * config.moe.latent_size *
                          config.moe.moe_intermediate_size;
    }
    const std::uint64_t vocabulary = std::uint64_t{config.vocab_size} * config.hidden_size;
    for (const TensorSpec& tensor : model_level_tensors(config)) cost.trunk_bytes += tensor.bytes();
    cost.trunk_bytes -= 2 * (vocabulary - config.hidden_size);  // one row of the embedding, bf16
    cost.head_flops = 2 * vocabulary;
    return cost;
}

}  // namespace k3::model
