// A step of a trunk stage in steady state takes no memory: its scratch was taken at start, the
// state of its sessions when they were opened.
//
// Counted is all that k3-trunk computes, from the taking apart of a decoded Step message to its
// logits. Outside, and counted in messages_test.cc: the messages themselves.

#include <doctest/doctest.h>

#include <algorithm>
#include <memory>
#include <string>
#include <vector>

#include "common/kernels/parallel.h"
#include "common/model/load.h"
#include "services/trunk/ram_weights.h"
#include "services/trunk/stage.h"
#include "services/trunk/step_request.h"
#include "services/trunk/streamed_weights.h"
#include "tests/allocations/counter.h"
#include "tests/support/golden.h"
#include "tests/support/local_experts.h"

namespace k3::test {

namespace {

constexpr std::size_t kMaxRows = 16;
constexpr int kWarmUp = 3;
constexpr int kCounted = 20;

const model::Model& checkpoint() {
    static const model::Model model = model::open_model(golden_dir() / "tiny-k3").value();
    return model;
}

/// A stage of tiny-k3 with everything it needs, and its sessions.
struct Trunk {
    LocalExperts experts{checkpoint(), kernels::kernels()};
    telemetry::Counters counters;
    std::unique_ptr<trunk::WeightSource> weights;
    std::unique_ptr<trunk::Stage> stage;
    trunk::SessionTable sessions;
    trunk::StepRequest request;
    transport::ArenaReader reader;
    std::vector<msg::Bytes> frames;

    /// `weights_bytes`: the budget; 0: all weights stay in memory.
    Trunk(trunk::LayerRange range, int n_threads, std::uint64_t weights_bytes = 0)
        : sessions(checkpoint().config, range, n_threads, {4, std::uint64_t{1} << 26U, 4096}) {
        kernels::set_threads(n_threads);
        experts.load_all();
        const storage::Checkpoint& files = *checkpoint().checkpoint;
        if (weights_bytes == 0) {
            weights = trunk::RamWeights::load(files, checkpoint().config, range, nullptr).value();
        } else {
            trunk::StreamedWeights::Options options;
            options.plan = model::plan_weights(checkpoint().config,
                                               {range.first, range.count, weights_bytes, 8192})
                               .value();
            auto from = trunk::CheckpointFiles::open(files, checkpoint().config, range,
                                                     storage::DirectFile::Mode::direct_if_possible);
            weights = trunk::StreamedWeights::load(std::move(from).value(), checkpoint().config,
                                                   range, std::move(options), counters, nullptr)
                          .value();
        }
        stage = trunk::Stage::create(checkpoint().config, *weights, experts, kernels::kernels(),
                                     {range, kMaxRows, n_threads})
                    .value();
    }

    /// A step as a message says it.
    Status run(const msg::Step& step) {
        RETURN_IF_ERROR(request.read(step, frames, reader, *stage, sessions));
        ASSIGN_OR_RETURN(const auto values, stage->step(request.input()));
        static_cast<void>(values);
        return Status::ok();
    }
};

/// Every session of `ids` goes on by `n_rows` rows, the last of each wanted.
void compose(Trunk& trunk, const std::vector<std::uint64_t>& ids, std::uint32_t n_rows,
             msg::Step& step) {
    step.rows.clear();
    step.want.clear();
    for (std::uint64_t id : ids) {
        const std::uint64_t at = trunk.sessions.find(id).value()->position();
        for (std::uint32_t i = 0; i < n_rows; ++i)
            step.rows.push_back({id, at + i, static_cast<std::uint32_t>((7 * at + 31 * i) % 256)});
        step.want.push_back(static_cast<std::uint32_t>(step.rows.size()) - 1);
    }
}

/// What 20 such steps take after 3 others.
std::size_t count_steps(Trunk& trunk, const std::vector<std::uint64_t>& ids, std::uint32_t n_rows) {
    msg::Step step;
    std::size_t before = 0;
    bool all_well = true;
    for (int i = 0; i < kWarmUp + kCounted; ++i) {
        compose(trunk, ids, n_rows, step);
        if (i == kWarmUp) before = n_allocations();
        all_well = trunk.run(step).has_value() && all_well;
    }
    const std::size_t n = n_allocations() - before;
    CHECK(all_well);
    return n;
}

}  // namespace

TEST_CASE("the counter sees new, malloc and calloc") {
    const std::size_t before = n_allocations();
    const auto made = std::make_unique<std::vector<int>>(100);
    void* volatile taken = std::malloc(10);
    void* volatile cleared = std::calloc(10, 10);
    std::free(taken);
    std::free(cleared);
    CHECK(n_allocations() - before >= 4);
}

TEST_CASE("a steady step of the whole trunk allocates nothing") {
#ifdef __clang__  // LLVM's OpenMP takes memory for each loop whose parts its threads take one by
                  // one
    const std::vector<int> thread_counts = {1};
#else
    const std::vector<int> thread_counts = {1, 2};
#endif
    for (int n_threads : thread_counts) {
        CAPTURE(n_threads);
        Trunk trunk({0, checkpoint().config.n_layers}, n_threads);
        for (std::uint64_t id : {1, 2, 3}) REQUIRE(trunk.sessions.open(id, 512).has_value());
        CHECK(count_steps(trunk, {1}, 1) == 0);        // decode
        CHECK(count_steps(trunk, {1, 2, 3}, 1) == 0);  // of several
        CHECK(count_steps(trunk, {2, 1}, 6) == 0);     // prefill in pieces
        CHECK(count_steps(trunk, {3}, 1) == 0);
    }
    kernels::set_threads(0);
}

TEST_CASE("a steady step with streamed weights allocates nothing") {
    Trunk trunk({0, checkpoint().config.n_layers}, 1, 900'000);
    for (std::uint64_t id : {1, 2}) REQUIRE(trunk.sessions.open(id, 512).has_value());
    CHECK(count_steps(trunk, {1}, 1) == 0);
    CHECK(count_steps(trunk, {1, 2}, 3) == 0);
    kernels::set_threads(0);
}

TEST_CASE("a steady step of the first of several stages allocates nothing") {
    Trunk trunk({0, 5}, 2);
    REQUIRE(trunk.sessions.open(1, 512).has_value());
    CHECK(count_steps(trunk, {1}, 1) == 0);
    kernels::set_threads(0);
}

}  // namespace k3::test
