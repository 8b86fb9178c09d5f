#pragma once
// The bytes of an arena segment; docs/formats/arena.md is the page that other readers follow.

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

#include "common/base/fd.h"
#include "common/base/result.h"
#include "common/transport/process_identity.h"

namespace k3::transport {

inline constexpr std::uint64_t kArenaMagic = 0x00414E455241334BULL;  // "K3ARENA\0"
inline constexpr std::uint32_t kArenaLayoutVersion = 1;
inline constexpr std::size_t kArenaPage = 4096;
inline constexpr std::size_t kMaxSegmentName = 200;
inline constexpr std::string_view kSegmentPrefix = "/k3-";

/// At offset 0. The first six fields keep their place in every layout version, so that segments of
/// other releases can be swept.
struct ArenaHeader {
    std::uint64_t magic = 0;
    std::uint32_t layout_version = 0;
    std::uint32_t owner_pid = 0;
    std::uint64_t owner_start_ticks = 0;
    std::uint64_t owner_pid_namespace = 0;
    std::uint64_t nonce = 0;
    std::uint64_t slot_bytes = 0;  // multiple of kArenaPage
    std::uint32_t n_slots = 0;
    std::uint32_t slot_entry_bytes = 0;
    std::uint64_t data_offset = 0;  // of slot 0's bytes; the others follow without gaps

    ProcessIdentity owner() const { return {owner_pid, owner_start_ticks, owner_pid_namespace}; }
};
static_assert(sizeof(ArenaHeader) == 64);
static_assert(offsetof(ArenaHeader, layout_version) == 8);
static_assert(offsetof(ArenaHeader, owner_pid) == 12);
static_assert(offsetof(ArenaHeader, owner_start_ticks) == 16);
static_assert(offsetof(ArenaHeader, owner_pid_namespace) == 24);
static_assert(offsetof(ArenaHeader, nonce) == 32);
static_assert(offsetof(ArenaHeader, slot_bytes) == 40);
static_assert(offsetof(ArenaHeader, n_slots) == 48);
static_assert(offsetof(ArenaHeader, data_offset) == 56);

/// At offset kArenaPage, one per slot, a cache line each.
struct alignas(64) SlotEntry {
    std::atomic<std::uint64_t> generation;  // odd: being written; even: complete
    std::atomic<std::uint64_t> bytes;       // used bytes of the slot
};
static_assert(sizeof(SlotEntry) == 64);
static_assert(std::atomic<std::uint64_t>::is_always_lock_free);

inline constexpr std::size_t round_to_page(std::size_t bytes) {
    return (bytes + kArenaPage - 1) / kArenaPage * kArenaPage;
}

/// Keeps stores and loads on their side. ThreadSanitizer does not model fences, and needs none:
/// what crosses processes is invisible to it.
inline void memory_fence() noexcept {
#if defined(__SANITIZE_THREAD__)
    std::atomic_signal_fence(std::memory_order_seq_cst);
#else
    std::atomic_thread_fence(std::memory_order_seq_cst);
#endif
}

/// Where shm_open keeps the segment called `name`.
std::string segment_path(const std::string& name);

/// Refuses names that are not "/k3-" and then letters, digits, '-', '_' or '.': a message must not
/// make its receiver open anything else.
Status check_segment_name(std::string_view name);

/// The header of an open segment. Errors: io, corrupt (no arena).
Result<ArenaHeader> read_arena_header(const Fd& segment, const std::string& name);

}  // namespace k3::transport
