#pragma once
// Runs picked experts on latent rows: spec section 3.9, step 7, in the fixed point of the design.
//
//     sums[row] += round(weight * w2 SiTU(w1 z, w3 z) * 2^40)      for every pick of the row
//
// The bits of a row's sum depend on nothing but its picks: a row's products have one order of
// additions (the lane contract), a term is rounded on its own, and integer sums have no order. So
// rows may be grouped and experts taken in any order, by any number of threads and servers.

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "common/base/deadline.h"
#include "common/base/result.h"
#include "common/kernels/kernel_table.h"
#include "common/model/config.h"
#include "common/pack/expert_record.h"
#include "common/transport/messages/experts.h"
#include "common/transport/server.h"
#include "services/experts/expert_cache.h"
#include "services/experts/pick_groups.h"

namespace k3::experts {

class Executor {
  public:
    /// How long a call took, by what.
    struct Times {
        std::uint64_t read_ns = 0;  // waiting for experts
        std::uint64_t compute_ns = 0;
    };

    /// Takes all its memory here. Borrows `cache`.
    Executor(const model::ModelConfig& config, const kernels::KernelTable& table,
             ExpertCache& cache);

    /// Has the progress of every run told there; null: nowhere.
    void report_to(transport::WorkProgress* work) noexcept { work_ = work; }

    /// rows [n_rows, latent_size]; `groups` are those of `picks`; sums [n_rows, latent_size], set.
    /// Errors: those of ExpertCache::acquire; corrupt (a term that is not finite or reaches 2^18,
    /// naming layer, expert and row). `sums` holds anything then.
    Status run(std::uint32_t layer, std::span<const float> rows, std::span<const msg::Pick> picks,
               const PickGroups& groups, Deadline deadline, std::span<std::int64_t> sums,
               Times& times);

  private:
    Status run_expert(ExpertKey key, std::span<const std::byte> record, std::span<const float> rows,
                      std::span<const msg::Pick> picks, std::span<const std::uint32_t> chosen,
                      std::span<std::int64_t> sums);
    void compute(std::span<const std::byte> record, std::size_t n);
    Result<ExpertLease> acquire(ExpertKey key, Deadline deadline);

    const pack::ExpertRecord record_;
    const kernels::KernelTable& table_;
    ExpertCache& cache_;
    const float situ_beta_;
    const float situ_linear_beta_;
    transport::WorkProgress* work_ = nullptr;
    std::vector<std::uint32_t> order_;  // [n_experts]
    std::vector<float> x_;              // [kBlockRows, latent]
    std::vector<float> gate_;           // [kBlockRows, inner]
    std::vector<float> up_;             // [kBlockRows, inner]
    std::vector<float> y_;              // [kBlockRows, latent]
};

}  // namespace k3::experts
