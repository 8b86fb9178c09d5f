#pragma once
// The RAM tier of an expert server: a fixed number of slots in front of the expert store.
//
// A step visits the MoE layers in order and returns to the first only at the next token, so plain
// LRU gives up every expert shortly before its next use. Which experts stay is therefore left to
// an EvictionPolicy; this file owns the bytes, knows who is reading them, and has them read.
//
// The policy may refuse to keep an expert, and then it is read all the same, used once and let go.
// So some slots are set aside for passing experts (all of them, if there are only a few), and the
// policy keeps as many experts as the others can hold:
//
//   an expert is   kept         its slot stays when nobody uses it
//                  wanted       the current call will use it: its slot stays until it was leased
//                  speculative  a hint had it read and no call has wanted it yet
//                  leased       somebody reads its bytes
//   A slot whose expert is none of these is free. Being evicted only ends "kept": a slot in use is
//   never taken away.
//
// What a former run kept can be read again in the background (warm()): one expert at a time, only
// while nothing else waits to be read, and only into room that nobody else has taken.
//
// Threads: one compute thread calls visit, acquire and prefetch; leases may end on any thread. The
// reader threads started here only fill slots handed to them.

#include <condition_variable>
#include <cstddef>
#include <cstdint>
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
#include "services/experts/expert_store.h"
#include "services/experts/slot_memory.h"

namespace k3::experts {

class ExpertCache;

/// The packed weights of one resident expert; its slot is not reused while this lives. Move-only.
/// Must not outlive the cache.
class ExpertLease {
  public:
    ExpertLease(ExpertLease&& other) noexcept;
    ExpertLease& operator=(ExpertLease&& other) noexcept;
    ExpertLease(const ExpertLease&) = delete;
    ExpertLease& operator=(const ExpertLease&) = delete;
    ~ExpertLease();

    /// [record_bytes] MXFP4, laid out as docs/formats/expert_record.md says, and valid.
    std::span<const std::byte> bytes() const noexcept { return bytes_; }

  private:
    friend class ExpertCache;
    ExpertLease(ExpertCache& cache, std::uint32_t slot, std::span<const std::byte> bytes) noexcept
        : cache_(&cache), slot_(slot), bytes_(bytes) {}
    void release() noexcept;

    ExpertCache* cache_;  // null after a move
    std::uint32_t slot_;
    std::span<const std::byte> bytes_;
};

/// Since the start. Requests are uses of an expert by a call, not by a row.
struct CacheCounts {
    std::uint64_t hits = 0;                // kept when its layer was visited
    std::uint64_t misses = 0;              // not kept, a hint may have had it read
    std::uint64_t refused_admissions = 0;  // used once and let go
    std::uint64_t evictions = 0;
    std::uint64_t prefetch_reads = 0;    // started because of a hint
    std::uint64_t prefetch_useful = 0;   // of these, there when a call wanted it
    std::uint64_t prefetch_late = 0;     // of these, still being read then
    std::uint64_t prefetch_unused = 0;   // of these, let go without a use
    std::uint64_t prefetch_dropped = 0;  // hints for which there was no slot
    std::uint64_t warmed = 0;            // kept because a former run kept them
    std::uint64_t reads = 0;             // completed
    std::uint64_t failed_reads = 0;
    std::uint64_t read_wait_ns = 0;  // callers of acquire() waited
};

class ExpertCache {
  public:
    struct Options {
        std::uint64_t budget_bytes = 0;  // ceiling for all slots, rounded down to whole ones
        std::uint32_t n_layers = 0;
        std::uint32_t n_experts = 0;  // of a layer
        std::uint64_t n_held = 0;     // experts that can be asked for: more slots are not taken
        std::uint32_t top_k = 0;      // one row uses this many experts of a layer
        std::uint32_t n_readers = 4;  // threads; more than the disk's queue can use is no gain
        std::string policy = "rank-weighted";
    };
    /// What a budget buys.
    struct Slots {
        std::size_t n_slots = 0;
        std::size_t n_kept = 0;  // capacity of the policy; the other slots are for passing experts
    };

    /// Error: resource_exhausted if the smallest legal number of slots does not fit (one expert is
    /// read while another computes: 2, or 1 if one is all there is), naming the bytes it needs.
    static Result<Slots> slots_for(const Options& options, std::uint64_t slot_bytes);

    /// Takes all its memory here; no later call allocates. Borrows `store`.
    /// Errors: as slots_for; invalid_argument (unknown policy); resource_exhausted (the system
    /// gives no memory).
    static Result<std::unique_ptr<ExpertCache>> create(const Options& options, ExpertStore& store);
    /// Waits for reads in flight. All leases must have ended.
    ~ExpertCache();
    ExpertCache(const ExpertCache&) = delete;
    ExpertCache& operator=(const ExpertCache&) = delete;

    /// A call begins that uses these experts of `layer`, each once, in order of rank: decides which
    /// stay and starts the reads of the others, as many at a time as there are slots. What an
    /// earlier visit wanted and never acquired is given up.
    /// order [uses.size()] receives the indices of `uses` in the order in which they should be
    /// acquired: first what is there, then what is on its way, then the rest.
    void visit(std::uint32_t layer, std::span<const ExpertUse> uses,
               std::span<std::uint32_t> order);

    /// The expert's bytes, read from the store if need be; never a part of them, never stale ones.
    /// An expert that is no part of the current visit is read and let go.
    /// Errors: the store's for this expert (nothing of a failed read is kept: asking again reads
    /// again); resource_exhausted (every slot is leased); deadline_exceeded, naming both.
    Result<ExpertLease> acquire(ExpertKey key, Deadline deadline);

    /// Starts reads for these experts of `layer`, most useful first. A hint: what finds no slot is
    /// only counted, and a read that fails is forgotten (the acquire that follows reads again).
    void prefetch(std::uint32_t layer, std::span<const std::uint32_t> experts) noexcept;

    /// Has these experts, most valuable first, read and kept as far as there is room. Returns at
    /// once. A read that fails is forgotten.
    void warm(std::vector<KeptExpert> experts);

    /// What is kept now, with the policy's values, in any order. Any thread.
    std::vector<KeptExpert> kept() const;

    /// Any thread.
    CacheCounts counts() const;
    Slots slots() const noexcept { return sizes_; }

  private:
    friend class ExpertLease;

    enum class State : std::uint8_t { free, queued, reading, ready, failed };
    struct Slot {
        ExpertKey key;
        State state = State::free;
        bool wanted = false;
        bool speculative = false;
        std::uint32_t leases = 0;
        std::uint64_t visit = 0;            // during which a speculative read began
        std::span<const std::byte> record;  // where it lies in the slot, if ready
        std::optional<Error> error;
    };
    static constexpr std::uint32_t kNone = 0xFFFFFFFF;

    ExpertCache(const Options& options, ExpertStore& store, Slots sizes, SlotMemory memory,
                std::unique_ptr<EvictionPolicy> policy);

    // All of these with mutex_ held.
    std::size_t at(ExpertKey key) const noexcept;
    std::uint32_t find(ExpertKey key) const noexcept { return slot_of_[at(key)]; }
    void give_up_last_visit();
    void admit(ExpertKey key);
    void pump();
    std::uint32_t start_read(ExpertKey key);
    bool reclaim_speculative(bool fresh_ones_too);
    void end_speculation(std::uint32_t slot, std::uint64_t& counter);
    void want(std::uint32_t slot);
    void want_first(ExpertKey key);
    bool set_back_a_wanted_one();
    void make_free(std::uint32_t slot);
    void free_if_unused(std::uint32_t slot);
    ExpertLease lease(std::uint32_t slot);
    Error take_error(std::uint32_t slot);
    Error too_late(ExpertKey key) const;
    std::uint32_t next_to_read();
    bool can_warm() const noexcept;
    bool next_to_warm(KeptExpert& expert);
    void finish_read(std::uint32_t slot, Result<std::span<const std::byte>> read);

    void read_until_stopped();
    void release(std::uint32_t slot) noexcept;

    const Options options_;
    const Slots sizes_;
    ExpertStore& store_;
    SlotMemory memory_;

    mutable std::mutex mutex_;
    std::condition_variable reads_wanted_;
    std::condition_variable slots_changed_;
    bool stopping_ = false;
    std::unique_ptr<EvictionPolicy> policy_;
    std::vector<Slot> slots_;
    std::vector<std::uint32_t> slot_of_;      // [n_layers, n_experts], or kNone
    std::vector<std::uint32_t> free_;         // slots
    std::vector<std::uint32_t> read_queue_;   // slots, in the order to read them
    std::vector<std::uint32_t> speculative_;  // slots, oldest first
    std::vector<std::uint32_t> wanted_;       // slots the current visit wants or wanted
    std::vector<ExpertKey> waiting_;          // wanted, and there was no slot yet
    std::vector<ExpertKey> missed_;           // scratch of visit()
    std::vector<KeptExpert> to_warm_;         // the next one last
    bool warming_ = false;                    // one of them is being read
    std::uint64_t n_visits_ = 0;
    CacheCounts counts_;
    std::vector<std::jthread> readers_;
};

}  // namespace k3::experts
