#pragma once
// The weights of a stage in less memory than they have: what common/model/weight_plan.h keeps is
// read once at start, everything else again for every step, ahead of its use.
//
// The order of use is known and cyclic, so reads never guess and never wait for the step: whenever
// a piece has been used, the next ones that fit into the ring are started, across the ends of
// layers and of steps (layer 0 of the next step is read while this one computes the head). Only the
// head is not read for a step that has not said yet whether it wants logits.
//
// A step that failed leaves the order in the middle; the next one then begins with an empty ring.

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "common/base/memory_block.h"
#include "common/base/result.h"
#include "common/model/config.h"
#include "common/model/weight_plan.h"
#include "common/storage/read_pool.h"
#include "common/telemetry/counters.h"
#include "services/trunk/layer_range.h"
#include "services/trunk/weight_files.h"
#include "services/trunk/weight_ring.h"
#include "services/trunk/weights.h"

namespace k3::trunk {

class StreamedWeights final : public WeightSource {
  public:
    struct Options {
        model::WeightPlan plan;                                 // of this config and range
        std::optional<storage::ReadShape> shape;                // none: probed
        std::function<bool()> stopping = [] { return false; };  // ends waits with `cancelled`
        /// For tests: as in ReadPool.
        std::function<Status(const storage::ReadSource&, std::uint64_t, std::size_t)>
            before_request;
    };

    /// Takes all its memory here and reads what is kept. `files` hold this range; what they borrow
    /// and `counters` outlive this. Errors: those of WeightFiles, io, corrupt, resource_exhausted,
    /// cancelled.
    static Result<std::unique_ptr<StreamedWeights>> load(std::unique_ptr<WeightFiles> files,
                                                         const model::ModelConfig& config,
                                                         LayerRange range, Options options,
                                                         telemetry::Counters& counters,
                                                         const LoadProgress& progress);

    void begin_step(bool wants_head) override;
    const LayerWeights& layer(std::uint32_t layer) const override;
    const HeadWeights& head() const override { return head_; }
    Status embed(std::span<const std::uint32_t> tokens, float* out, std::size_t stride) override;
    Result<MatrixRows> next_rows(const Matrix& matrix) override;
    std::uint64_t bytes() const noexcept override { return options_.plan.memory_bytes(); }
    void publish_counters() noexcept override;

    const storage::ReadShape& read_shape() const noexcept { return pool_->shape(); }
    /// Why reads go through the page cache; empty if they do not.
    std::string why_buffered() const { return files_->why_buffered(); }

  private:
    StreamedWeights(std::unique_ptr<WeightFiles> files, const model::ModelConfig& config,
                    LayerRange range, Options options, telemetry::Counters& counters);
    const model::WeightPlan& plan() const noexcept { return options_.plan; }
    Status find_matrices();
    Status take_memory();
    Status read_kept(LoadReport& report);
    storage::ReadRange range_of(const model::WeightPiece& piece) const noexcept;

    void give_back() noexcept override;
    void fill();
    Status embed_some(std::span<const std::uint32_t> tokens, float* out, std::size_t stride);

    const model::ModelConfig& config_;
    const LayerRange range_;
    const Options options_;
    const std::unique_ptr<WeightFiles> files_;
    std::vector<storage::ReadRange> matrices_;  // of the plan
    storage::ReadRange embedding_;

    VectorStore vectors_;
    std::vector<LayerWeights> layers_;
    HeadWeights head_;

    MemoryBlock kept_memory_, ring_memory_, embedding_memory_;
    std::vector<const std::byte*> kept_;  // by piece; null: streamed
    std::unique_ptr<storage::PoolRead[]> row_reads_;
    std::unique_ptr<storage::ReadPool> pool_;  // after what it fills
    std::unique_ptr<WeightRing> ring_;         // after the pool, which it uses to the end

    // Where the step is, and where the reads are, in the pieces of the plan.
    std::size_t used_ = 0;
    std::size_t started_ = 0;
    bool is_in_step_ = false;
    bool wants_head_ = false;    // the step under way, or the last one
    bool is_step_ahead_ = true;  // `started_` counts for the step after that one
    bool is_lent_ = false;

    std::atomic<std::uint64_t>& read_bytes_;
    std::atomic<std::uint64_t>& wait_ns_;
    std::atomic<std::uint64_t>& device_bytes_;
    std::atomic<std::uint64_t>& busy_ns_;
    std::atomic<std::uint64_t>& cpu_ns_;
    std::atomic<std::uint64_t>& request_bytes_;
    std::atomic<std::uint64_t>& n_threads_;
    std::atomic<std::uint64_t>& token_bytes_;
};

}  // namespace k3::trunk
