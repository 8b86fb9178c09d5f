#pragma once
// A whole trunk in the test process: model, stages cut where the test says, sessions and experts,
// stepped without messages.

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "common/kernels/kernel_table.h"
#include "common/model/load.h"
#include "services/trunk/observer.h"
#include "services/trunk/ram_weights.h"
#include "services/trunk/session.h"
#include "services/trunk/stage.h"
#include "tests/support/local_experts.h"

namespace k3::test {

/// tests/golden/tiny-k3 and the embedded demo model, opened once per program.
const model::Model& tiny_model();
const model::Model& demo_model();

struct TokenRow {
    std::uint64_t session = 0;
    std::uint32_t token = 0;
};

class Harness {
  public:
    struct Options {
        std::vector<std::uint32_t> cuts;  // a further stage begins at each of these layers
        const kernels::KernelTable* table = nullptr;  // null: the process's
        int n_threads = 2;
        trunk::ExpertBackend* experts = nullptr;  // null: LocalExperts
        std::size_t max_step_rows = 256;
        model::MlaCache cache = model::MlaCache::f32;
        /// Null: RamWeights.
        std::function<std::unique_ptr<trunk::WeightSource>(trunk::LayerRange)> weights;
    };
    explicit Harness(const model::Model& model) : Harness(model, Options()) {}
    Harness(const model::Model& model, Options options);

    void open(std::uint64_t session, std::uint64_t max_positions = 512);
    void fork(std::uint64_t source, std::uint64_t target, std::uint64_t max_positions = 512);
    void drop(std::uint64_t session);

    /// Logits [wanted.size(), vocab_size].
    Result<std::vector<float>> step(const std::vector<TokenRow>& rows,
                                    const std::vector<std::uint32_t>& wanted);
    /// Feeds `ids` in pieces of `chunk` rows and returns the logits of every position.
    std::vector<float> feed(std::uint64_t session, const std::vector<std::uint32_t>& ids,
                            std::size_t chunk);
    /// Appends `n` tokens of largest logit after feeding `ids` in one piece; stops early after one
    /// of `stop_ids`.
    std::vector<std::uint32_t> greedy(std::uint64_t session, const std::vector<std::uint32_t>& ids,
                                      std::size_t n, const std::vector<std::uint32_t>& stop_ids);

    void set_observer(trunk::StepObserver* observer);
    trunk::Session& session(std::uint64_t id, std::uint32_t layer);
    LocalExperts& experts() { return *experts_; }
    std::size_t vocab_size() const { return config_.vocab_size; }

  private:
    struct Part {
        std::unique_ptr<trunk::WeightSource> weights;
        std::unique_ptr<trunk::SessionTable> sessions;
        std::unique_ptr<trunk::Stage> stage;
    };

    model::ModelConfig config_;  // of the model, with the cache that the test wants
    std::unique_ptr<LocalExperts> experts_;
    std::vector<Part> parts_;
};

/// Index of the largest value, the lowest of equals.
std::uint32_t argmax(std::span<const float> values);

/// Row `r` of a [n, width] array.
inline std::span<const float> row_of(const std::vector<float>& values, std::size_t r,
                                     std::size_t width) {
    return {values.data() + r * width, width};
}

/// One prompt of tests/golden/expected/manifest.json.
struct GoldenPrompt {
    std::string name;
    std::vector<std::uint32_t> ids;
    std::vector<std::uint32_t> greedy;
};
std::vector<GoldenPrompt> golden_prompts();

}  // namespace k3::test
