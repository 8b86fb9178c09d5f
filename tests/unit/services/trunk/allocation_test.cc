// A step in steady state takes no memory: its scratch was taken at start, its sessions' state when
// they were opened. Counted by replacing the program's allocator.

#include <doctest/doctest.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <new>

#include "common/kernels/parallel.h"
#include "services/trunk/ram_weights.h"
#include "services/trunk/stage.h"
#include "tests/unit/services/trunk/harness.h"

namespace {

std::atomic<std::size_t> g_allocations{0};

void* count_and_take(std::size_t bytes) {
    g_allocations.fetch_add(1, std::memory_order_relaxed);
    void* memory = std::malloc(std::max<std::size_t>(bytes, 1));
    if (memory == nullptr) std::abort();
    return memory;
}

}  // namespace

void* operator new(std::size_t bytes) { return count_and_take(bytes); }
void* operator new[](std::size_t bytes) { return count_and_take(bytes); }
void* operator new(std::size_t bytes, const std::nothrow_t&) noexcept {
    return count_and_take(bytes);
}
void* operator new[](std::size_t bytes, const std::nothrow_t&) noexcept {
    return count_and_take(bytes);
}
void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete[](void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, std::size_t) noexcept { std::free(memory); }
void operator delete[](void* memory, std::size_t) noexcept { std::free(memory); }

namespace k3::test {

namespace {

/// Experts that answer nothing but zeros, so that only the stage is counted.
class SilentExperts final : public trunk::ExpertBackend {
  public:
    void prefetch(const trunk::Routing&) noexcept override {}
    Status start(const trunk::Routing&, std::span<const float>) override { return Status::ok(); }
    Status finish(std::span<std::int64_t> sums) override {
        std::fill(sums.begin(), sums.end(), 0);
        return Status::ok();
    }
};

}  // namespace

TEST_CASE("a step in steady state allocates nothing") {
    const model::Model& model = tiny_model();
    const trunk::LayerRange all{0, model.config.n_layers};
    kernels::set_threads(1);
    SilentExperts experts;
    auto weights = trunk::RamWeights::load(*model.checkpoint, model.config, all, nullptr).value();
    auto stage =
        trunk::Stage::create(model.config, *weights, experts, kernels::kernels(), {all, 16, 1})
            .value();
    trunk::SessionTable sessions(model.config, all, 1, {4, std::uint64_t{1} << 24U, 4096});
    trunk::Session* a = sessions.open(1, 64).value();
    trunk::Session* b = sessions.open(2, 64).value();

    const auto step = [&] {
        const std::uint64_t at = a->position();
        const trunk::StepRow rows[] = {{a, at, 5}, {b, b->position(), 6}, {a, at + 1, 7}};
        const std::uint32_t wanted[] = {1, 2};
        return stage->step({rows, {}, wanted}).has_value();
    };
    CHECK(step());
    const std::size_t before = g_allocations;
    bool all_well = true;
    for (int i = 0; i < 10; ++i) all_well = step() && all_well;
    const std::size_t after = g_allocations;
    CHECK(all_well);
    CHECK(after == before);
    CHECK(before > 0);
}

}  // namespace k3::test
