#pragma once
// An expert store without files: contents derived from (layer, expert), so that the bytes of
// another expert are recognised; reads that wait until the test lets them go, and reads that fail.

#include <condition_variable>
#include <cstdint>
#include <cstring>
#include <map>
#include <mutex>
#include <set>
#include <span>
#include <utility>

#include "services/experts/expert_store.h"

namespace k3::test {

class FakeStore final : public experts::ExpertStore {
  public:
    static constexpr std::uint64_t kBytes = 200;  // neither a page nor a multiple of a word's size

    std::uint64_t record_bytes() const noexcept override { return kBytes; }

    /// The record begins at another byte of the slot for each expert.
    Result<std::span<const std::byte>> read(experts::ExpertKey key,
                                            std::span<std::byte> slot) override {
        const std::span<std::byte> record =
            slot.subspan((key.layer * 1000 + key.expert * 37) % storage::kBlockBytes, kBytes);
        std::unique_lock lock(mutex_);
        const auto id = std::pair(key.layer, key.expert);
        ++n_reads_[id];
        ++n_now_;
        most_at_once_ = std::max(most_at_once_, n_now_);
        changed_.notify_all();
        changed_.wait(lock, [&] { return !closed_ && !held_.contains(id); });
        --n_now_;
        changed_.notify_all();
        if (auto fault = faults_.find(id); fault != faults_.end()) {
            // What a failed read leaves behind must never be seen.
            std::memset(slot.data(), 0xEE, slot.size());
            return fault->second;
        }
        for (std::size_t i = 0; i < record.size(); ++i) record[i] = content(key, i);
        counts_.read_bytes += kBytes;
        ++counts_.runs;
        return std::span<const std::byte>(record);
    }
    experts::StoreCounts counts() const noexcept override {
        std::lock_guard lock(mutex_);
        return counts_;
    }

    static std::byte content(experts::ExpertKey key, std::size_t i) {
        std::uint32_t x = key.layer * 0x9E3779B1U + key.expert * 0x85EBCA77U +
                          static_cast<std::uint32_t>(i) * 0xC2B2AE3DU;
        x ^= x >> 15U;
        x *= 0x2C1B3C6DU;
        return static_cast<std::byte>(x >> 24U);
    }
    static bool holds(std::span<const std::byte> bytes, experts::ExpertKey key) {
        if (bytes.size() != kBytes) return false;
        for (std::size_t i = 0; i < bytes.size(); ++i)
            if (bytes[i] != content(key, i)) return false;
        return true;
    }

    /// Reads that begin while closed wait.
    void close() { set_closed(true); }
    void open() { set_closed(false); }
    /// The same for one expert.
    void hold(experts::ExpertKey key) {
        std::lock_guard lock(mutex_);
        held_.insert({key.layer, key.expert});
    }
    void let_go(experts::ExpertKey key) {
        std::lock_guard lock(mutex_);
        held_.erase({key.layer, key.expert});
        changed_.notify_all();
    }
    /// Until n reads are going on.
    void wait_for_reads(std::size_t n) {
        std::unique_lock lock(mutex_);
        changed_.wait(lock, [&] { return n_now_ >= n; });
    }

    void fail(experts::ExpertKey key, Error error) {
        std::lock_guard lock(mutex_);
        faults_.insert_or_assign({key.layer, key.expert}, std::move(error));
    }
    void heal(experts::ExpertKey key) {
        std::lock_guard lock(mutex_);
        faults_.erase({key.layer, key.expert});
    }

    std::size_t reads(experts::ExpertKey key) const {
        std::lock_guard lock(mutex_);
        const auto found = n_reads_.find({key.layer, key.expert});
        return found == n_reads_.end() ? 0 : found->second;
    }
    std::size_t most_at_once() const {
        std::lock_guard lock(mutex_);
        return most_at_once_;
    }

  private:
    using Id = std::pair<std::uint32_t, std::uint32_t>;

    void set_closed(bool closed) {
        std::lock_guard lock(mutex_);
        closed_ = closed;
        changed_.notify_all();
    }

    mutable std::mutex mutex_;
    std::condition_variable changed_;
    bool closed_ = false;
    std::set<Id> held_;
    std::map<Id, Error> faults_;
    std::map<Id, std::size_t> n_reads_;
    experts::StoreCounts counts_;
    std::size_t n_now_ = 0;
    std::size_t most_at_once_ = 0;
};

}  // namespace k3::test
