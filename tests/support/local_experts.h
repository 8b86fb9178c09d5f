#pragma once
// Routed experts computed inside the test process, straight from the checkpoint's bytes: an
// ExpertBackend without sockets, servers or a cache, written independently of services/experts.

#include <cstdint>
#include <functional>
#include <map>
#include <utility>
#include <vector>

#include "common/kernels/kernel_table.h"
#include "common/model/load.h"
#include "services/trunk/expert_backend.h"

namespace k3::test {

class LocalExperts final : public trunk::ExpertBackend {
  public:
    LocalExperts(const model::Model& model, const kernels::KernelTable& table)
        : model_(model), table_(table) {}

    void prefetch(const trunk::Routing& routing) noexcept override;
    Status start(const trunk::Routing& routing, std::span<const float> latent) override;
    Status finish(std::span<std::int64_t> sums) override;

    /// Reads every expert of the checkpoint; after that, and a call of as many rows, nothing here
    /// takes memory.
    void load_all();

    /// Asked at each finish(); an error becomes its result.
    std::function<Status(std::uint32_t layer)> fault;
    std::uint64_t n_prefetches = 0;

  private:
    struct Expert {
        std::vector<std::byte> parts[6];
    };
    void take_scratch();
    const Expert& load(std::uint32_t layer, std::uint32_t expert);
    Status run_expert(std::uint32_t expert, std::span<const std::size_t> picks,
                      std::span<std::int64_t> sums);

    const model::Model& model_;
    const kernels::KernelTable& table_;
    std::map<std::pair<std::uint32_t, std::uint32_t>, Expert> loaded_;
    std::vector<std::size_t> order_;        // picks of a call by expert
    std::vector<float> x_, gate_, up_, y_;  // rows of one expert
    trunk::Routing routing_;
    std::span<const float> latent_;
};

}  // namespace k3::test
