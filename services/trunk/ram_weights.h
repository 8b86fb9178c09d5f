#pragma once
// All weights of a stage's layers in memory, read once at start, by threads of this process: they
// lie on the NUMA node of the cores that it keeps to, if these are of one node (docs/operating.md).

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "common/base/result.h"
#include "common/model/config.h"
#include "common/storage/checkpoint.h"
#include "services/trunk/buffer.h"
#include "services/trunk/layer_range.h"
#include "services/trunk/packed_runs.h"
#include "services/trunk/weights.h"

namespace k3::trunk {

class RamWeights final : public WeightSource {
  public:
    /// Bytes of the tensors that load() reads.
    static std::uint64_t bytes_to_load(const model::ModelConfig& config, LayerRange range);

    /// Errors: not_found or incompatible (a tensor is absent or has another type or shape), io,
    /// corrupt, resource_exhausted, cancelled.
    static Result<std::unique_ptr<RamWeights>> load(const storage::Checkpoint& checkpoint,
                                                    const model::ModelConfig& config,
                                                    LayerRange range, const LoadProgress& progress);
    /// The same from packs of this model. Errors: those of PackedRuns::load.
    static Result<std::unique_ptr<RamWeights>> load(const pack::TrunkPacks& packs,
                                                    const model::ModelConfig& config,
                                                    LayerRange range, const LoadProgress& progress);

    void begin_step(bool) override {}
    const LayerWeights& layer(std::uint32_t layer) const override;
    const HeadWeights& head() const override { return head_; }
    Status embed(std::span<const std::uint32_t> tokens, float* out, std::size_t stride) override;
    /// Aborts: nothing is streamed.
    Result<MatrixRows> next_rows(const Matrix& matrix) override;
    std::uint64_t bytes() const noexcept override;

  private:
    RamWeights() = default;
    /// `begin` is called before each part.
    Status bind(const model::ModelConfig& config, LayerRange range, TensorFinder& tensors,
                const std::function<Status(const std::string& what)>& begin);
    void give_back() noexcept override {}

    std::uint32_t first_ = 0;
    std::uint32_t hidden_size_ = 0;
    std::vector<Buffer<std::byte>> matrices_;  // as stored; none if they lie in a pack's runs
    PackedRuns runs_;
    VectorStore vectors_;
    std::vector<LayerWeights> layers_;
    Matrix embedding_;  // [vocab_size, hidden_size]
    HeadWeights head_;
};

}  // namespace k3::trunk
