#include "common/model/vision_tensors.h"

#include <fmt/format.h>

#include <string>
#include <utility>

namespace k3::model {

namespace {

using storage::DType;
using storage::TensorSpec;

constexpr std::uint64_t kTextWidth = 7168;
constexpr std::uint64_t kWidth = 1024;
constexpr std::uint64_t kInnerWidth = 4096;  // of the MLP, and of four merged patches
constexpr std::uint64_t kHeadsWidth = 1536;
constexpr std::uint64_t kGrid = 64;
constexpr std::uint64_t kPatch = 14;
constexpr int kBlocks = 27;

TensorSpec weight(std::string name, std::vector<std::uint64_t> shape) {
    return {std::move(name) + ".weight", DType::bf16, std::move(shape)};
}

}  // namespace

std::vector<TensorSpec> vision_projector_tensors() {
    return {weight("mm_projector.proj.0", {kInnerWidth, kInnerWidth}),
            weight("mm_projector.proj.2", {kTextWidth, kInnerWidth}),
            weight("mm_projector.post_norm", {kTextWidth})};
}

std::vector<TensorSpec> vision_tower_tensors() {
    std::vector<TensorSpec> tensors;
    for (int block = 0; block < kBlocks; ++block) {
        const std::string prefix = fmt::format("vision_tower.encoder.blocks.{}.", block);
        tensors.push_back(weight(prefix + "wqkv", {3 * kHeadsWidth, kWidth}));
        tensors.push_back(weight(prefix + "wo", {kWidth, kHeadsWidth}));
        tensors.push_back(weight(prefix + "mlp.fc0", {kInnerWidth, kWidth}));
        tensors.push_back(weight(prefix + "mlp.fc1", {kWidth, kInnerWidth}));
        tensors.push_back(weight(prefix + "norm0", {kWidth}));
        tensors.push_back(weight(prefix + "norm1", {kWidth}));
    }
    tensors.push_back(weight("vision_tower.encoder.final_layernorm", {kWidth}));
    tensors.push_back(weight("vision_tower.patch_embed.pos_emb", {kGrid, kGrid, kWidth}));
    tensors.push_back(weight("vision_tower.patch_embed.proj", {kWidth, 3, kPatch, kPatch}));
    return tensors;
}

}  // namespace k3::model
