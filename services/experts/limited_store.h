#pragma once
// A store that reads no faster than a given rate: how would a slower disk do?
//
// A means to measure with, not to run with: it behaves like a disk that serves one request after
// the other at that rate, whatever the one below can do beyond. Bytes and errors are those of the
// store behind it.

#include <cstdint>
#include <memory>
#include <mutex>

#include "common/base/deadline.h"
#include "services/experts/expert_store.h"

namespace k3::experts {

class LimitedStore final : public ExpertStore {
  public:
    LimitedStore(std::unique_ptr<ExpertStore> store, std::uint64_t bytes_per_s)
        : store_(std::move(store)), bytes_per_s_(bytes_per_s) {}

    std::uint64_t record_bytes() const noexcept override { return store_->record_bytes(); }
    Result<std::span<const std::byte>> read(ExpertKey key, std::span<std::byte> slot) override;
    void visit(std::uint32_t layer, std::span<const ExpertUse> uses) noexcept override {
        store_->visit(layer, uses);
    }
    StoreCounts counts() const noexcept override { return store_->counts(); }

  private:
    Clock::time_point reserve();

    const std::unique_ptr<ExpertStore> store_;
    const std::uint64_t bytes_per_s_;
    std::mutex mutex_;
    Clock::time_point free_at_;  // when the disk has done all that it was asked for
};

}  // namespace k3::experts
