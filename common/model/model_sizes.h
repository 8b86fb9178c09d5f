#pragma once
// What the parts of a model weigh: parameters, bytes as stored, bytes that a token touches. Spec
// section 5, computed from the config's tensors.

#include <cstdint>

#include "common/model/config.h"

namespace k3::model {

struct PartSize {
    std::uint64_t parameters = 0;
    std::uint64_t bytes = 0;

    PartSize& operator+=(const PartSize& other) noexcept {
        parameters += other.parameters;
        bytes += other.bytes;
        return *this;
    }
    bool operator==(const PartSize&) const = default;
};

/// One MXFP4 matrix of a routed expert, in bytes.
struct PackedMatrixSize {
    std::uint64_t packed = 0;
    std::uint64_t scales = 0;
};

/// Everything of one layer that is no routed expert.
struct TrunkLayerSize {
    PartSize attention;
    PartSize dense;   // FFN of a layer without experts
    PartSize shared;  // shared experts
    PartSize latent;  // projections into the latent space and back, norm of the aggregate
    PartSize router;
    PartSize vectors;  // norms and attention-residual vectors

    /// Of a layer with experts: what is neither attention nor vectors.
    PartSize moe() const noexcept;
    PartSize total() const noexcept;
};

struct ModelSizes {
    PackedMatrixSize w1, w2, w3;
    PartSize expert;
    std::uint64_t n_experts = 0;  // of all layers
    PartSize layer_experts;       // of one layer
    PartSize all_experts;

    // Of all layers together, by kind of attention.
    std::uint32_t n_kda = 0;
    std::uint32_t n_mla = 0;
    std::uint32_t n_moe = 0;
    PartSize kda, mla, dense, shared, latent, router, vectors;
    PartSize trunk;

    PartSize embedding, head;  // each
    PartSize ends;             // both, and the vectors of the model
    PartSize resident;         // trunk and ends
    PartSize text;             // and all experts

    // One token at batch 1.
    std::uint64_t picks = 0;          // experts used
    std::uint64_t picked_bytes = 0;   // and read
    std::uint64_t touched_bytes = 0;  // trunk, picked experts, head
    std::uint64_t used_parameters = 0;
};

TrunkLayerSize trunk_layer_size(const ModelConfig& config, std::uint32_t layer);
ModelSizes model_sizes(const ModelConfig& config);

}  // namespace k3::model
