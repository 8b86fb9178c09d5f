#pragma once
// The shared-memory arena: where a process puts tensors for readers on the same box.
//
// Why not inside the message: a hop through ZeroMQ copies its bytes twice and wakes two I/O
// threads; a pointer costs nothing. Every process that sends tensors owns one segment and is the
// only writer of it. The segment is a header and equal slots, used in turn. A slot has a
// generation: odd while it is being written, even when it is complete, and it only grows. A message
// names the generation it means, so a reader that comes too late (or meets the segment of another
// process under the same name) gets `stale`, never wrong data. Layout: docs/formats/arena.md.
//
// Names: "/k3-<run id>-<service>-<pid>". The owner unlinks its segment when it ends; the launcher
// sweeps those of dead processes when it starts and when a service of its own has ended.

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "common/base/result.h"
#include "common/transport/messages/types.h"

namespace k3::transport {

/// The writing side. One thread uses it. The segment is unlinked by the destructor.
class Arena {
  public:
    struct Options {
        std::string name;            // of the segment, starting with '/'
        std::size_t slot_bytes = 0;  // largest tensor that fits; rounded up to 4096
        std::uint32_t n_slots = 0;   // a tensor lives until n_slots further ones were written
    };
    /// Errors: resource_exhausted (/dev/shm is too small: both numbers), io.
    static Result<std::unique_ptr<Arena>> create(const Options& options);
    ~Arena();
    Arena(const Arena&) = delete;
    Arena& operator=(const Arena&) = delete;

    /// Copies `bytes` into the next slot. Error: resource_exhausted if larger than a slot.
    Result<msg::ShmPayload> write(std::span<const std::byte> bytes);

    std::size_t slot_bytes() const noexcept;
    /// What peers are asked to read before this arena is used towards them.
    const msg::SegmentProbe& probe() const noexcept;

  private:
    class Impl;
    explicit Arena(std::unique_ptr<Impl> impl);
    std::unique_ptr<Impl> impl_;
};

/// The reading side: segments of peers, opened once and kept. One thread uses it.
class ArenaReader {
  public:
    ArenaReader();
    ~ArenaReader();
    ArenaReader(const ArenaReader&) = delete;
    ArenaReader& operator=(const ArenaReader&) = delete;

    /// True if the segment can be opened here and holds the nonce.
    bool can_read(const msg::SegmentProbe& probe);

    /// Copies the payload out and checks the generation before and after.
    /// Errors: not_found (no such segment), invalid_argument (name, offset or size that no slot
    /// has), stale (slot reused or being rewritten), incompatible (unknown layout version),
    /// corrupt (not an arena, or truncated by somebody).
    Result<msg::Bytes> read(const msg::ShmPayload& payload);

  private:
    class Impl;
    std::unique_ptr<Impl> impl_;
};

/// "/k3-<run id in hex>-<service>-<pid>", cut to a legal length.
std::string segment_name(std::uint64_t run_id, std::string_view service);

/// True if the segment is there, holds the nonce, and its owner is not certainly gone.
bool segment_in_use(const msg::SegmentProbe& probe);

/// Removes /dev/shm segments of this project whose owner process is gone; returns their names.
std::vector<std::string> sweep_dead_segments();
/// The same for one run: what a service left that was killed while the others go on.
std::vector<std::string> sweep_dead_segments(std::uint64_t run_id);

}  // namespace k3::transport
