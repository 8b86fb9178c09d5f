#include "services/trunk/ram_weights.h"

#include <utility>

#include "common/base/memory.h"
#include "common/model/tensor_names.h"

namespace k3::trunk {

namespace {

/// Reads tensors as they are asked for: matrices into memory of their own, vectors into one buffer.
class Loader final : public TensorFinder {
  public:
    Loader(const storage::Checkpoint& checkpoint, LoadReport& report,
           std::vector<Buffer<std::byte>>& matrices)
        : checkpoint_(checkpoint), report_(report), matrices_(matrices) {}

    Result<Matrix> matrix(const storage::TensorSpec& spec) override {
        ASSIGN_OR_RETURN(const storage::TensorInfo* tensor,
                         checkpoint_.require(spec.name, spec.dtype, spec.shape));
        ASSIGN_OR_RETURN(auto bytes, Buffer<std::byte>::create(tensor->bytes, spec.name.c_str()));
        prefer_huge_pages(bytes.span());
        RETURN_IF_ERROR(checkpoint_.read(*tensor, bytes.span()));
        report_.add(tensor->bytes);
        matrices_.push_back(std::move(bytes));
        return Matrix{{kernels::WeightType::bf16, matrices_.back().data(), nullptr, spec.shape[0],
                       spec.shape[1]},
                      Matrix::kInMemory};
    }

    Result<std::span<const std::byte>> vector(const storage::TensorSpec& spec) override {
        ASSIGN_OR_RETURN(const storage::TensorInfo* tensor,
                         checkpoint_.require(spec.name, spec.dtype, spec.shape));
        vector_.resize(tensor->bytes);
        RETURN_IF_ERROR(checkpoint_.read(*tensor, vector_));
        report_.add(tensor->bytes);
        return std::span<const std::byte>(vector_);
    }

  private:
    const storage::Checkpoint& checkpoint_;
    LoadReport& report_;
    std::vector<Buffer<std::byte>>& matrices_;
    std::vector<std::byte> vector_;
};

/// Finds tensors where a pack's runs have them.
class RunFinder final : public TensorFinder {
  public:
    explicit RunFinder(const PackedRuns& runs) : runs_(runs) {}

    Result<Matrix> matrix(const storage::TensorSpec& spec) override {
        ASSIGN_OR_RETURN(const auto bytes, runs_.find(spec));
        return Matrix{
            {kernels::WeightType::bf16, bytes.data(), nullptr, spec.shape[0], spec.shape[1]},
            Matrix::kInMemory};
    }
    Result<std::span<const std::byte>> vector(const storage::TensorSpec& spec) override {
        return runs_.find(spec);
    }

  private:
    const PackedRuns& runs_;
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
                                                     LayerRange range,
                                                     const LoadProgress& progress) {
    RETURN_IF_ERROR(model::check_trunk_tensors(checkpoint, config, range.first, range.count));
    std::unique_ptr<RamWeights> weights(new RamWeights);
    LoadReport report(progress, bytes_to_load(config, range));
    Loader loader(checkpoint, report, weights->matrices_);
    RETURN_IF_ERROR(weights->bind(
        config, range, loader, [&report](const std::string& what) { return report.begin(what); }));
    return weights;
}

Result<std::unique_ptr<RamWeights>> RamWeights::load(const pack::TrunkPacks& packs,
                                                     const model::ModelConfig& config,
                                                     LayerRange range,
                                                     const LoadProgress& progress) {
    std::unique_ptr<RamWeights> weights(new RamWeights);
    ASSIGN_OR_RETURN(weights->runs_, PackedRuns::load(packs, config, range, progress));
    RunFinder finder(weights->runs_);
    RETURN_IF_ERROR(
        weights->bind(config, range, finder, [](const std::string&) { return Status::ok(); }));
    return weights;
}

Status RamWeights::bind(const model::ModelConfig& config, LayerRange range, TensorFinder& tensors,
                        const std::function<Status(const std::string& what)>& begin) {
    first_ = range.first;
    hidden_size_ = config.hidden_size;
    layers_.reserve(range.count);
    for (std::uint32_t layer = range.first; layer < range.end(); ++layer) {
        RETURN_IF_ERROR(begin("layer " + std::to_string(layer)));
        ASSIGN_OR_RETURN(const LayerWeights bound, bind_layer(config, layer, tensors, vectors_));
        layers_.push_back(bound);
    }
    if (range.is_first()) {
        RETURN_IF_ERROR(begin("embedding"));
        ASSIGN_OR_RETURN(embedding_, tensors.matrix(embedding_spec(config)));
    }
    if (range.is_last(config)) {
        RETURN_IF_ERROR(begin("output head"));
        ASSIGN_OR_RETURN(head_, bind_head(config, tensors, vectors_));
    }
    return Status::ok();
}

const LayerWeights& RamWeights::layer(std::uint32_t layer) const {
    K3_CHECK(layer >= first_ && layer - first_ < layers_.size(), std::to_string(layer));
    return layers_[layer - first_];
}

Result<MatrixRows> RamWeights::next_rows(const Matrix& matrix) {
    K3_CHECK(false, "matrix " + std::to_string(matrix.number) + " should be in memory");
    return MatrixRows(matrix.stored, 0, nullptr);
}

Status RamWeights::embed(std::span<const std::uint32_t> tokens, float* out, std::size_t stride) {
    const std::size_t row_bytes = std::size_t{hidden_size_} * sizeof(std::uint16_t);
    const auto* rows = static_cast<const std::byte*>(embedding_.stored.data);
    for (std::size_t i = 0; i < tokens.size(); ++i)
        widen_bf16({rows + tokens[i] * row_bytes, row_bytes}, {out + i * stride, hidden_size_});
    return Status::ok();
}

std::uint64_t RamWeights::bytes() const noexcept {
    std::uint64_t total = vectors_.bytes() + runs_.bytes();
    for (const auto& matrix : matrices_) total += matrix.size();
    return total;
}

}  // namespace k3::trunk
