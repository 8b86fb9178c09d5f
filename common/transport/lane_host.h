#pragma once
// The server's end of its fast lanes: which caller has which, what they ask, and one bell for all.
//
// A lane belongs to one connection of one caller. It is given at hello, together with a token that
// every message in it repeats, and goes to somebody else only when its caller is certainly gone or
// says hello again. One request is outstanding in a lane; its reply is given once.
//
// Threads: all functions may be called from any thread but listen(), next() and wait(), which
// belong to the one that takes requests.

#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <vector>

#include "common/base/cores.h"
#include "common/base/deadline.h"
#include "common/base/result.h"
#include "common/transport/lane_segment.h"
#include "common/transport/messages/control.h"

namespace k3::transport {

struct ServerClient;

/// Which request of which user of a lane; number 0: none.
struct LaneTag {
    std::uint32_t index = 0;
    std::uint32_t number = 0;
    std::uint64_t token = 0;
};

class LaneHost {
  public:
    struct Options {
        /// 16 rows of released size fit, with 16 picks each; larger calls put their tensors into
        /// arenas. Memory is taken as it is used: a lane that sees single rows holds 50 KiB.
        LaneSegment::Sizes sizes{8, 256U << 10U, 512U << 10U};
        CoreUse cores;              // of this service, for callers that ask whether to spin
        std::int64_t spin_us = -1;  // for the next request; -1: as long as callers say
    };
    /// Errors: those of LaneSegment::create.
    static Result<std::unique_ptr<LaneHost>> create(const Options& options);
    LaneHost(const LaneHost&) = delete;
    LaneHost& operator=(const LaneHost&) = delete;
    ~LaneHost() = default;

    /// A lane for the connection that calls itself `key`, whose process owns the segment of
    /// `caller`. An empty offer: all are taken.
    msg::LaneOffer assign(std::uint64_t key, const msg::SegmentProbe& caller,
                          std::shared_ptr<ServerClient> client);

    struct Call {
        LaneTag tag;
        std::shared_ptr<ServerClient> client;
        Status status;     // whether the message could be read
        Incoming message;  // its envelope is valid until the next call of next()
    };
    /// What rings after this is not missed by wait(), if next() and whatever else rings are asked
    /// in between.
    void listen() noexcept;
    std::optional<Call> next();
    /// Until somebody rings, or the deadline; perhaps less.
    void wait(Deadline deadline) noexcept;
    void ring() noexcept { set_and_wake(segment_.bell(), 1); }

    /// False if the reply must take the socket: too large, answered already, or the lane has
    /// another user by now.
    bool answer(const LaneTag& tag, std::span<const std::byte> envelope,
                const std::vector<msg::Bytes>& frames);
    /// Tells the caller to look there.
    void answer_by_socket(const LaneTag& tag) { answer(tag, {}, {}); }

  private:
    struct Lane {
        std::uint64_t key = 0;  // 0: free
        std::uint64_t token = 0;
        msg::SegmentProbe caller;
        std::shared_ptr<ServerClient> client;
        std::uint32_t last_number = 0;  // of the requests seen
        std::uint32_t open_number = 0;  // of the one to be answered; 0: none
    };

    LaneHost(const Options& options, LaneSegment segment);
    Lane* find_lane(std::uint64_t key);
    std::optional<Call> look(std::uint32_t index);

    const Options options_;
    const LaneSegment segment_;
    std::uint32_t next_ = 0;            // where next() begins: every lane gets its turn
    std::uint32_t caller_spin_us_ = 0;  // as the last request said
    msg::Bytes envelope_;               // of the call that next() found last

    std::mutex mutex_;
    std::vector<Lane> lanes_;
};

}  // namespace k3::transport
