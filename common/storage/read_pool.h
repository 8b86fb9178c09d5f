#pragma once
// Threads that read ahead: a queue of large reads, cut into requests of the size the device likes.
//
// One pread keeps a device busy only while somebody waits in it. So a few threads wait, each in a
// request of its own, and the next request of a read goes to whoever is free first; where a source
// compares checksums, it does so in these threads. Reads begin in the order in which they were
// started. io_uring would save these threads and nothing else: at requests of megabytes both reach
// the device's rate.
//
// A source may be striped over several devices. Each of them then has threads of its own, which
// take the next stripes of their lane from the first read that has some left: a device that is
// slower than the others keeps none of them waiting as long as reads are queued.
//
// Memory and order belong to the caller: a PoolRead is part of the caller's own slot, and starting
// one allocates nothing.

#include <array>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <mutex>
#include <span>
#include <thread>
#include <vector>

#include "common/base/deadline.h"
#include "common/base/result.h"
#include "common/storage/read_source.h"

namespace k3::storage {

/// How a device is read: requests of this size, or of as many whole units as reach it, one in each
/// thread.
struct ReadShape {
    std::size_t request_bytes = std::size_t{4} << 20;  // a multiple of kBlockBytes
    std::uint32_t n_threads = 4;                       // for each lane

    bool operator==(const ReadShape&) const = default;
};

inline constexpr std::uint32_t kMaxLanes = 8;

/// A read that was given to a pool. It must stay where it is until wait() or cancel() returns.
class PoolRead {
  public:
    PoolRead() = default;
    PoolRead(const PoolRead&) = delete;
    PoolRead& operator=(const PoolRead&) = delete;

  private:
    friend class ReadPool;
    enum class State : std::uint8_t { idle, queued, reading };

    State state_ = State::idle;  // queued: some of it is in no thread's hands yet
    /// The part of the next request in a lane; nothing if there is none left.
    struct Request {
        std::uint64_t offset = 0;
        std::span<std::byte> bytes;
    };
    bool has_request(std::uint32_t lane) const noexcept { return at_[lane] < end_; }
    void set_lanes() noexcept;
    Request take_request(std::uint32_t lane, std::size_t request_bytes) noexcept;

    const ReadSource* source_ = nullptr;
    Lanes lanes_;
    std::uint64_t begin_ = 0;
    std::uint64_t end_ = 0;
    std::span<std::byte> dst_;
    std::array<std::uint64_t, kMaxLanes> at_{};  // in no thread's hands yet, by lane
    std::uint32_t n_lanes_left_ = 0;             // that have a next request
    std::uint32_t n_requests_ = 0;               // in threads' hands
    Status status_;                              // the first error
    PoolRead* next_ = nullptr;                   // in the queue
};

/// Any thread may call; a PoolRead belongs to one caller at a time.
class ReadPool {
  public:
    struct Options {
        ReadShape shape;
        /// For tests: called in the reading thread before each request, may be slow or fail it.
        std::function<Status(const ReadSource& source, std::uint64_t offset, std::size_t bytes)>
            before_request;
        std::uint32_t n_lanes = 1;  // at most kMaxLanes, at least those of every source
    };
    /// Since the start.
    struct Totals {
        std::uint64_t bytes = 0;    // read, whole blocks
        std::uint64_t cpu_ns = 0;   // of the reading threads
        std::uint64_t busy_ns = 0;  // during which at least one request was under way
        std::array<std::uint64_t, kMaxLanes> lane_bytes{};  // of `bytes`
    };

    explicit ReadPool(Options options);
    /// Drops what has not begun and waits for the requests that have.
    ~ReadPool();
    ReadPool(const ReadPool&) = delete;
    ReadPool& operator=(const ReadPool&) = delete;

    enum class Place : std::uint8_t { last, first };
    /// Fills `dst` with the units of `source` from `offset` on. `first`: before all that has not
    /// begun. `read` is idle; `source` outlives it.
    void start(PoolRead& read, const ReadSource& source, std::uint64_t offset,
               std::span<std::byte> dst, Place place = Place::last);
    /// Until it is done; the read is idle then, unless the error is `cancelled`: `stopping` is
    /// asked every 50 ms, and the read goes on when it has answered yes. Errors: those of
    /// ReadSource::read, the first of its requests that failed; cancelled.
    Status wait(PoolRead& read, const std::function<bool()>& stopping = {});
    /// Gives the read up: what has not begun is dropped, requests under way are waited for.
    void cancel(PoolRead& read);

    const ReadShape& shape() const noexcept { return options_.shape; }
    Totals totals() const;

  private:
    void run(std::uint32_t lane);
    PoolRead* next_read(std::uint32_t lane) const noexcept;
    void push(PoolRead& read, Place place);
    void remove(PoolRead& read);

    const Options options_;
    mutable std::mutex mutex_;
    std::condition_variable work_;
    std::condition_variable done_;
    PoolRead* head_ = nullptr;
    PoolRead* tail_ = nullptr;
    std::uint32_t n_busy_ = 0;  // threads in a request
    Clock::time_point busy_since_;
    Totals totals_;
    bool is_ending_ = false;
    std::vector<std::thread> threads_;
};

}  // namespace k3::storage
