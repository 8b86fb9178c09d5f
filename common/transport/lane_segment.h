#pragma once
// The shared memory behind the fast lanes of one server: a bell and, for each lane, a slot for
// requests and a slot for replies. docs/formats/lane.md is the page for other implementations.
//
// Both sides map and write it, so it is not an arena in /dev/shm but a sealed memfd: nobody can cut
// it, which would be SIGBUS for whoever has it mapped, and it is gone with its last user, however
// that ends. (Reading and writing by system calls, as ArenaReader does, was tried: 20 us for a hop
// that takes 12.) A caller opens it through /proc/<pid>/fd.

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "common/base/deadline.h"
#include "common/base/fd.h"
#include "common/base/result.h"
#include "common/transport/link.h"
#include "common/transport/messages/control.h"

namespace k3::transport {

inline constexpr std::uint64_t kLaneMagic = 0x0053454E414C334BULL;  // "K3LANES\0"
inline constexpr std::uint32_t kLaneLayoutVersion = 1;
inline constexpr std::size_t kLanePage = 4096;
inline constexpr std::uint32_t kMaxLanes = 64;
inline constexpr std::size_t kMaxLaneFrames = 4;
/// Longest sleep before the sleeper looks after everything else again: whether the peer lives.
inline constexpr std::int64_t kLaneSleepMs = 5;

/// A futex word and whether somebody sleeps on it.
struct LaneWord {
    std::atomic<std::uint32_t> value;
    std::atomic<std::uint32_t> is_slept_on;
};
static_assert(sizeof(LaneWord) == 8 && std::atomic<std::uint32_t>::is_always_lock_free);

/// At offset 0.
struct LaneHeader {
    std::uint64_t magic = kLaneMagic;
    std::uint32_t layout_version = kLaneLayoutVersion;
    std::uint32_t n_lanes = 0;
    std::uint64_t nonce = 0;
    std::uint32_t request_bytes = 0;  // of a slot with its head; multiples of kLanePage
    std::uint32_t reply_bytes = 0;
};
static_assert(sizeof(LaneHeader) == 32);
inline constexpr std::size_t kBellOffset = 128;  // a LaneWord: 0 while nothing has come

/// At the begin of a slot. The word is the number of the message, from 1, and written last.
struct LaneHead {
    LaneWord number;
    std::uint64_t token;           // of the lane's present user
    std::uint32_t spin_us;         // in a request: how long the server may spin for the next one
    std::uint32_t envelope_bytes;  // in a reply 0: the answer takes the socket
    std::uint32_t n_frames;
    std::uint32_t frame_bytes[kMaxLaneFrames];
    std::uint32_t zeros[5];
};
static_assert(sizeof(LaneHead) == 64);
static_assert(offsetof(LaneHead, token) == 8);
static_assert(offsetof(LaneHead, spin_us) == 16);
static_assert(offsetof(LaneHead, envelope_bytes) == 20);
static_assert(offsetof(LaneHead, frame_bytes) == 28);

/// Until the word differs from `value` or `until`.
void spin_on(const LaneWord& word, std::uint32_t value, Clock::time_point until) noexcept;
/// The same, asleep; may return early.
void sleep_on(LaneWord& word, std::uint32_t value, Deadline deadline) noexcept;
void set_and_wake(LaneWord& word, std::uint32_t value) noexcept;

/// One slot: written by one side, read by the other.
class LaneSlot {
  public:
    LaneSlot(std::byte* memory, std::size_t bytes) noexcept : memory_(memory), bytes_(bytes) {}

    LaneHead& head() const noexcept { return *reinterpret_cast<LaneHead*>(memory_); }
    /// Bytes that a message takes here: envelope and frames, each padded.
    static std::size_t size_of(std::span<const std::byte> envelope,
                               const std::vector<msg::Bytes>& frames) noexcept;
    bool fits(std::size_t message_bytes) const noexcept {
        return message_bytes <= bytes_ - sizeof(LaneHead);
    }

    /// Writes message `number` and wakes the reader. It must fit, with kMaxLaneFrames at most.
    void put(std::uint32_t number, std::uint64_t token, std::span<const std::byte> envelope,
             const std::vector<msg::Bytes>& frames) const noexcept;
    /// Copies message `number`, which has been seen to be there, the envelope to `buffer`.
    /// Errors: corrupt (sizes that no slot has), stale (it changed while it was read).
    Status take(std::uint32_t number, msg::Bytes& buffer, Incoming& message) const;

  private:
    std::byte* memory_;
    std::size_t bytes_;
};

class LaneSegment {
  public:
    struct Sizes {
        std::uint32_t n_lanes = 0;
        std::uint32_t request_bytes = 0;
        std::uint32_t reply_bytes = 0;
    };
    /// Of this process. Memory is taken as it is used. Error: io.
    static Result<LaneSegment> create(const Sizes& sizes);
    /// Of the peer that made the offer. Errors: not_found (not on this box, gone), stale (another
    /// process by now), incompatible (layout), corrupt (can be cut, or has no such lane).
    static Result<LaneSegment> open(const msg::LaneOffer& offer);

    LaneSegment(LaneSegment&& other) noexcept;
    LaneSegment& operator=(LaneSegment&&) = delete;
    LaneSegment(const LaneSegment&) = delete;
    LaneSegment& operator=(const LaneSegment&) = delete;
    ~LaneSegment();

    /// How a caller finds it.
    msg::LaneOffer offer() const noexcept;
    LaneWord& bell() const noexcept { return *reinterpret_cast<LaneWord*>(base_ + kBellOffset); }
    LaneSlot request(std::uint32_t lane) const noexcept;
    LaneSlot reply(std::uint32_t lane) const noexcept;

  private:
    LaneSegment() = default;
    Status map();
    std::size_t lane_offset(std::uint32_t lane) const noexcept;

    LaneHeader header_;
    Fd fd_;
    std::byte* base_ = nullptr;
};

}  // namespace k3::transport
