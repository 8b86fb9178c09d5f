#include "services/experts/executor.h"

#include <fmt/format.h>

#include <algorithm>
#include <atomic>

#include "common/base/check.h"
#include "common/kernels/parallel.h"

namespace k3::experts {

namespace {

/// Rows computed together: each weight is decoded once for all of them, and with the released
/// sizes their vectors (3.4 MB) still fit a cache.
constexpr std::size_t kBlockRows = 64;
/// Multiply-adds that one element of SiTU is worth: three exponentials and as many divisions.
constexpr std::size_t kSituWork = 64;

std::uint64_t ns_between(Clock::time_point from, Clock::time_point to) {
    return static_cast<std::uint64_t>(
        std::chrono::duration_cast<std::chrono::nanoseconds>(to - from).count());
}

}  // namespace

Executor::Executor(const model::ModelConfig& config, const kernels::KernelTable& table,
                   ExpertCache& cache)
    : record_(config),
      table_(table),
      cache_(cache),
      situ_beta_(config.situ_beta),
      situ_linear_beta_(config.situ_linear_beta),
      order_(config.moe.n_experts),
      x_(kBlockRows * record_.latent_size()),
      gate_(kBlockRows * record_.inner_size()),
      up_(gate_.size()),
      y_(x_.size()) {}

Status Executor::run(std::uint32_t layer, std::span<const float> rows,
                     std::span<const msg::Pick> picks, const PickGroups& groups, Deadline deadline,
                     std::span<std::int64_t> sums, Times& times) {
    K3_CHECK(sums.size() == rows.size(), fmt::format("{} and {}", sums.size(), rows.size()));
    std::fill(sums.begin(), sums.end(), 0);
    const std::span<const ExpertUse> uses = groups.uses();
    const std::span<std::uint32_t> order = std::span(order_).first(uses.size());
    cache_.visit(layer, uses, order);
    Clock::time_point start = Clock::now();
    for (std::uint32_t i : order) {
        const ExpertKey key{layer, uses[i].expert};
        ASSIGN_OR_RETURN(ExpertLease lease, acquire(key, deadline));
        const Clock::time_point there = Clock::now();
        times.read_ns += ns_between(start, there);
        RETURN_IF_ERROR(run_expert(key, lease.bytes(), rows, picks, groups.picks_of(i), sums));
        start = Clock::now();
        times.compute_ns += ns_between(there, start);
        if (work_ != nullptr) work_->advance();
    }
    return Status::ok();
}

/// A read has a deadline of its own: waiting for it is no standstill.
Result<ExpertLease> Executor::acquire(ExpertKey key, Deadline deadline) {
    if (work_ == nullptr) return cache_.acquire(key, deadline);
    work_->waits_for_reads.store(true, std::memory_order_relaxed);
    Result<ExpertLease> lease = cache_.acquire(key, deadline);
    work_->waits_for_reads.store(false, std::memory_order_relaxed);
    return lease;
}

Status Executor::run_expert(ExpertKey key, std::span<const std::byte> record,
                            std::span<const float> rows, std::span<const msg::Pick> picks,
                            std::span<const std::uint32_t> chosen, std::span<std::int64_t> sums) {
    const std::size_t latent = record_.latent_size();
    for (std::size_t first = 0; first < chosen.size(); first += kBlockRows) {
        const auto block = chosen.subspan(first, std::min(kBlockRows, chosen.size() - first));
        for (std::size_t i = 0; i < block.size(); ++i)
            std::copy_n(rows.data() + picks[block[i]].row * latent, latent, x_.data() + i * latent);
        compute(record, block.size());
        // A row has each expert once, so the picks of a block add to different rows.
        std::atomic<std::size_t> bad = block.size();
        kernels::parallel_for(block.size(), latent, [&](std::size_t i) {
            const msg::Pick& pick = picks[block[i]];
            if (table_.accumulate_fixed(y_.data() + i * latent, latent, pick.weight,
                                        sums.data() + pick.row * latent) == latent)
                return;
            std::size_t least = bad.load();
            while (i < least && !bad.compare_exchange_weak(least, i)) {
            }
        });
        if (bad < block.size())
            return Error{ErrorCode::corrupt,
                         fmt::format("layer {} expert {} row {}: a value is not finite or, times "
                                     "its weight, reaches 2^18",
                                     key.layer, key.expert, picks[block[bad]].row),
                         "check that trunk and experts come from one checkpoint and that neither "
                         "is damaged"};
    }
    return Status::ok();
}

/// y = w2 SiTU(w1 x, w3 x) for the first n rows of x_.
void Executor::compute(std::span<const std::byte> record, std::size_t n) {
    const std::size_t latent = record_.latent_size();
    const std::size_t inner = record_.inner_size();
    kernels::matmul(table_, record_.gate(record), x_.data(), latent, n, gate_.data(), inner);
    kernels::matmul(table_, record_.up(record), x_.data(), latent, n, up_.data(), inner);
    kernels::parallel_for(n, inner * kSituWork, [&](std::size_t i) {
        float* gate = gate_.data() + i * inner;
        table_.situ_glu(gate, up_.data() + i * inner, inner, situ_beta_, situ_linear_beta_, gate);
    });
    kernels::matmul(table_, record_.down(record), gate_.data(), inner, n, y_.data(), latent);
}

}  // namespace k3::experts
