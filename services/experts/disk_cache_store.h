#pragma once
// A bounded cache on a local disk in front of a slow store, such as a checkpoint on a network
// mount.
//
// The checksum costs 0.10 CPU s for each GiB read, two and a half times the direct read itself.
// What was read from the origin is written behind: the reader copies the record to one of a few
// buffers and goes on, and a thread of its own writes it. If no buffer is free the record is not
// cached this time. The files are those of disk_cache_files.h, kept between runs; which experts
// stay is left to the same policy as in RAM, which here sees the visits of all calls, whatever RAM
// holds.
//
// A damaged entry is dropped, counted and told, and the record comes from the origin. When nothing
// can be written (disk full, read-only) that is told once, reading goes on, and writing is tried
// again every minute.
//
// A record that a hint has read before its call came is judged by the visits before it.
//
// Threads: read() any, several at a time; visit() one.

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <filesystem>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "common/base/deadline.h"
#include "common/base/result.h"
#include "common/experts/eviction_policy.h"
#include "services/experts/disk_cache_files.h"
#include "services/experts/expert_store.h"
#include "services/experts/slot_memory.h"

namespace k3::experts {

/// Since the start, but for the last two.
struct DiskCacheCounts {
    std::uint64_t hits = 0;       // reads answered from the disk
    std::uint64_t misses = 0;     // from the origin, damaged entries included
    std::uint64_t damaged = 0;    // entries that were lost, truncated or wrong
    std::uint64_t refused = 0;    // worth less than everything that is there
    std::uint64_t unwritten = 0;  // no free buffer, or writing had failed
    std::uint64_t writes = 0;
    std::uint64_t failed_writes = 0;
    std::uint64_t evictions = 0;
    std::uint64_t entries = 0;  // now, those being written included
    std::uint64_t capacity = 0;
};

class DiskCacheStore final : public ExpertStore {
  public:
    struct Options {
        std::filesystem::path directory;
        std::uint64_t budget_bytes = 0;  // on the disk, bookkeeping included
        std::string fingerprint;         // of the checkpoint
        std::uint32_t n_layers = 0;
        std::uint32_t n_experts = 0;  // of a layer
        std::string policy = "rank-weighted";
    };

    /// On the disk: so many experts, the lists of their values and of what memory held, each of
    /// them twice while it is replaced, and directory, lock and owner.
    static std::uint64_t disk_bytes(const Options& options, std::uint64_t record_bytes,
                                    std::uint64_t n_entries) noexcept;

    /// Opens the directory, forgets the least valuable entries until the budget is kept. Borrows
    /// `origin`.
    /// Errors: those of DiskCacheFiles::open; invalid_argument (a budget below one entry, naming
    /// the bytes needed; unknown policy); resource_exhausted (memory).
    static Result<std::unique_ptr<DiskCacheStore>> create(const Options& options,
                                                          ExpertStore& origin);
    /// Writes what has been queued and the entries' values.
    ~DiskCacheStore() override;
    DiskCacheStore(const DiskCacheStore&) = delete;
    DiskCacheStore& operator=(const DiskCacheStore&) = delete;

    std::uint64_t record_bytes() const noexcept override { return origin_.record_bytes(); }
    /// As the origin's: what is wrong with the cache is no error.
    Result<std::span<const std::byte>> read(ExpertKey key, std::span<std::byte> slot) override;
    void visit(std::uint32_t layer, std::span<const ExpertUse> uses) noexcept override;
    /// Of disk and origin together.
    StoreCounts counts() const noexcept override;

    DiskCacheCounts disk_counts() const;
    /// Returns when nothing waits to be written any more.
    void wait_until_written();

  private:
    enum class State : std::uint8_t { absent, waiting, present };
    /// A record in a buffer, and the entry that has to go first.
    struct Job {
        ExpertKey key;
        std::uint32_t buffer = 0;
        std::optional<ExpertKey> evicted;
    };

    DiskCacheStore(const Options& options, ExpertStore& origin, DiskCacheFiles files,
                   SlotMemory buffers, std::unique_ptr<EvictionPolicy> policy);
    std::size_t at(ExpertKey key) const noexcept {
        return std::size_t{key.layer} * options_.n_experts + key.expert;
    }
    Status take_stock();
    std::vector<KeptExpert> load_values() const;
    void save_values();

    bool is_present(ExpertKey key) const;
    void forget_damaged(ExpertKey key, const Error& error);
    void offer(ExpertKey key, std::span<const std::byte> record);
    void write_until_stopped();
    void write_entry(const Job& job);
    void finish_write(const Job& job, const Status& written);

    const Options options_;
    ExpertStore& origin_;
    DiskCacheFiles files_;
    SlotMemory buffers_;

    mutable std::mutex mutex_;
    std::condition_variable work_;
    std::condition_variable idle_;
    bool stopping_ = false;
    bool trouble_ = false;           // the last write failed
    Clock::time_point try_again_{};  // when the next one may be tried
    std::unique_ptr<EvictionPolicy> policy_;
    std::vector<State> states_;        // [n_layers, n_experts]; not absent: the policy keeps it
    std::vector<std::uint32_t> free_;  // buffers
    std::deque<Job> jobs_;             // at most as many as buffers
    DiskCacheCounts counts_;
    StoreCounts read_;  // from the disk
    std::jthread writer_;
};

}  // namespace k3::experts
