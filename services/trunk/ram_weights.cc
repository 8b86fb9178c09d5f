#include "services/trunk/ram_weights.h"

#include <bit>
#include <cstring>
#include <utility>

#include "common/base/memory.h"
#include "common/model/tensor_names.h"

namespace k3::trunk {

namespace {

/// Reports before each part and adds its bytes after it.
class Reporter {
  public:
    Reporter(const RamWeights::Progress& progress, std::uint64_t total)
        : progress_(progress), total_(total) {}

    Status begin(const std::string& what) {
        if (!progress_ || progress_(done_, total_, what)) return Status::ok();
        return Error{ErrorCode::cancelled, "loading stopped before " + what, ""};
    }
    void add(std::uint64_t bytes) { done_ += bytes; }

  private:
    const RamWeights::Progress& progress_;
    std::uint64_t total_;
    std::uint64_t done_ = 0;
};

}  // namespace

std::uint64_t RamWeights::bytes_to_load(const model::ModelConfig& config, LayerRange range) {
    std::uint64_t total = 0;
    for (std::uint32_t layer = range.first; layer < range.end(); ++layer)
        for (const auto& spec : model::trunk_layer_tensors(config, layer)) total += spec.bytes();
    for (const auto& spec : model::model_level_tensors(config))
        if (spec.name == model::kEmbeddingTensor ? range.is_first() : range.is_last(config))
            total += spec.bytes();
    return total;
}

Result<std::unique_ptr<RamWeights>> RamWeights::load(const storage::Checkpoint& checkpoint,
                                                     const model::ModelConfig& config,
                                                     LayerRange range, const Progress& progress) {
    RETURN_IF_ERROR(model::check_trunk_tensors(checkpoint, config, range.first, range.count));
    std::unique_ptr<RamWeights> weights(new RamWeights);
    weights->first_ = range.first;
    weights->hidden_size_ = config.hidden_size;

    Reporter report(progress, bytes_to_load(config, range));

    TensorBytes read = [&](const std::string& name, storage::DType dtype,
                           std::span<const std::uint64_t> shape) -> Result<const std::byte*> {
        ASSIGN_OR_RETURN(const storage::TensorInfo* tensor, checkpoint.require(name, dtype, shape));
        ASSIGN_OR_RETURN(auto bytes, Buffer<std::byte>::create(tensor->bytes, name.c_str()));
        prefer_huge_pages(bytes.span());
        RETURN_IF_ERROR(checkpoint.read(*tensor, bytes.span()));
        report.add(tensor->bytes);
        weights->tensors_.push_back(std::move(bytes));
        return static_cast<const std::byte*>(weights->tensors_.back().data());
    };

    weights->layers_.reserve(range.count);
    for (std::uint32_t layer = range.first; layer < range.end(); ++layer) {
        RETURN_IF_ERROR(report.begin("layer " + std::to_string(layer)));
        ASSIGN_OR_RETURN(const LayerWeights bound,
                         bind_layer(config, layer, read, weights->vectors_));
        weights->layers_.push_back(bound);
    }
    if (range.is_first()) {
        RETURN_IF_ERROR(report.begin("embedding"));
        const std::uint64_t shape[] = {config.vocab_size, config.hidden_size};
        ASSIGN_OR_RETURN(weights->embedding_,
                         read(std::string(model::kEmbeddingTensor), storage::DType::bf16, shape));
    }
    if (range.is_last(config)) {
        RETURN_IF_ERROR(report.begin("output head"));
        ASSIGN_OR_RETURN(weights->head_, bind_head(config, read, weights->vectors_));
    }
    return weights;
}

Result<LayerLease> RamWeights::layer(std::uint32_t layer) {
    K3_CHECK(layer >= first_ && layer - first_ < layers_.size(), std::to_string(layer));
    return LayerLease(layers_[layer - first_]);
}

Status RamWeights::embed(std::span<const std::uint32_t> tokens, float* out, std::size_t stride) {
    for (std::size_t i = 0; i < tokens.size(); ++i) {
        const std::byte* row = embedding_ + std::size_t{tokens[i]} * hidden_size_ * 2;
        for (std::uint32_t d = 0; d < hidden_size_; ++d) {
            std::uint16_t bits = 0;
            std::memcpy(&bits, row + std::size_t{d} * 2, sizeof(bits));
            out[i * stride + d] = std::bit_cast<float>(std::uint32_t{bits} << 16U);
        }
    }
    return Status::ok();
}

std::uint64_t RamWeights::bytes() const noexcept {
    std::uint64_t total = vectors_.bytes();
    for (const auto& matrix : tensors_) total += matrix.size();
    return total;
}

}  // namespace k3::trunk
