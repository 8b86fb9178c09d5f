#pragma once
// A step of rows through a range of layers: the forward pass of the model. Spec section 3.2.
//
// Rows of any number of sessions, prefill and decode mixed, go through one layer after the other
// together. A row's result depends on nothing but its own session: not on its neighbours, on how a
// prompt was cut into steps, on threads, or on where the layers are cut into stages.

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "common/base/result.h"
#include "common/kernels/kernel_table.h"
#include "common/model/config.h"
#include "services/trunk/attention_residual.h"
#include "services/trunk/batch.h"
#include "services/trunk/expert_backend.h"
#include "services/trunk/kda.h"
#include "services/trunk/layer_range.h"
#include "services/trunk/mla.h"
#include "services/trunk/moe.h"
#include "services/trunk/observer.h"
#include "services/trunk/products.h"
#include "services/trunk/weights.h"

namespace k3::trunk {

struct StepInput {
    std::span<const StepRow> rows;          // at least one; of one session in order of position
    std::span<const float> hidden;          // [n_rows, in_vectors, hidden_size]; first stage: empty
    std::span<const std::uint32_t> wanted;  // last stage: rows whose logits are asked, ascending
};

/// One thread uses it.
class Stage {
  public:
    struct Options {
        LayerRange range;
        std::size_t max_step_rows = 0;
        int n_threads = 1;  // the most that will compute at the same time
    };

    /// Takes all its scratch here; a step allocates nothing. Borrows everything it is given.
    /// Errors: resource_exhausted, unsupported.
    static Result<std::unique_ptr<Stage>> create(const model::ModelConfig& config,
                                                 WeightSource& weights, ExpertBackend& experts,
                                                 const kernels::KernelTable& table,
                                                 const Options& options);

    /// The caller has checked the input: sessions of this range, positions next in line and within
    /// the session, tokens below vocab_size. Returns logits [n_wanted, vocab_size] in the last
    /// stage, rows [n_rows, out_vectors, hidden_size] in others, valid until the next step.
    /// After an error every session of the step is poisoned.
    /// Errors: of the weight source and the backend; corrupt (a value that is not finite).
    Result<std::span<const float>> step(const StepInput& input);

    /// Null for none.
    void set_observer(StepObserver* observer) noexcept { observer_ = observer; }

    const model::ModelConfig& config() const noexcept { return config_; }
    LayerRange range() const noexcept { return options_.range; }
    std::size_t max_step_rows() const noexcept { return options_.max_step_rows; }
    /// Vectors of one row on entry and exit; 0: tokens, logits.
    std::uint32_t in_vectors() const noexcept;
    std::uint32_t out_vectors() const noexcept;
    /// Of the last step: waiting for experts.
    std::uint64_t expert_wait_ns() const noexcept { return expert_wait_ns_; }

  private:
    Stage(const model::ModelConfig& config, WeightSource& weights, ExpertBackend& experts,
          const kernels::KernelTable& table, const Options& options)
        : config_(config),
          weights_(weights),
          experts_(experts),
          table_(table),
          products_(table, weights),
          options_(options) {}
    Status take_scratch();

    void group_by_session(std::span<const StepRow> rows);
    Status begin(const StepInput& input);
    Status run_layer(const LayerWeights& weights);
    Status run_head(std::span<const std::uint32_t> wanted);
    Result<std::span<const float>> run(const StepInput& input);

    /// x = RMS(mix of the listed rows; norm), with the observer told about both.
    void mix_and_norm(std::span<const std::uint32_t> rows, Vector query, Vector norm, MixSite site,
                      std::uint32_t layer);
    void observe(Site site, std::uint32_t layer, const RowsView& rows) const;
    RowsView view(const Buffer<float>& buffer, std::size_t n_rows) const noexcept;
    /// Error: corrupt, naming the first row with a value that is not finite.
    Status check_finite(const RowsView& view, std::span<const std::uint32_t> rows,
                        std::uint32_t layer, const char* what) const;

    const model::ModelConfig& config_;
    WeightSource& weights_;
    ExpertBackend& experts_;
    const kernels::KernelTable& table_;
    const Products products_;
    const Options options_;
    StepObserver* observer_ = nullptr;
    std::uint64_t expert_wait_ns_ = 0;

    ResidualStream stream_;
    Kda kda_;
    Mla mla_;
    FeedForward ffn_;
    Buffer<float> x_, y_;                  // [max_rows, hidden_size], into and out of a sub-layer
    Buffer<float> logits_;                 // last stage: [max_rows, vocab_size]
    Batch batch_;                          // of the current step
    std::vector<std::uint32_t> all_rows_;  // 0, 1, 2, ...
    std::vector<std::uint32_t> by_session_;
    std::vector<SessionRun> runs_;
    std::vector<std::uint32_t> tokens_;
};

}  // namespace k3::trunk
