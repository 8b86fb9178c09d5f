#pragma once
// The caller's end of a fast lane: one request at a time in shared memory, and its reply.
//
// A wait is bounded by some milliseconds, because a lane cannot tell that its peer has died: the
// channel looks at the socket's connection in between.

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "common/base/result.h"
#include "common/transport/lane_segment.h"
#include "common/transport/link.h"
#include "common/transport/messages/control.h"

namespace k3::transport {

class LaneLink final : public Link {
  public:
    /// Errors: those of LaneSegment::open.
    static Result<std::unique_ptr<LaneLink>> open(const msg::LaneOffer& offer);

    /// would_block while a request is outstanding, and for what does not fit.
    SendOutcome send(msg::Bytes& envelope, std::vector<msg::Bytes>& frames) override;
    /// An empty envelope says that the reply takes the socket.
    bool receive(Incoming& message) override;
    void wait(Deadline deadline, bool for_room) override;
    const std::string& ended() const noexcept override { return ended_; }

    /// True if messages of these sizes can go through now.
    bool takes(std::size_t request_bytes, std::size_t reply_bytes) const noexcept;
    /// How long to spin for a reply, and the server for the next request, before sleeping.
    void set_spin_us(std::uint32_t us) noexcept { spin_us_ = us; }

  private:
    LaneLink(LaneSegment segment, const msg::LaneOffer& offer);
    bool end(std::string reason);

    const LaneSegment segment_;
    const LaneSlot request_;
    const LaneSlot reply_;
    const std::uint64_t token_;
    msg::Bytes envelope_;  // of the reply received last
    std::uint32_t spin_us_ = 0;
    std::uint32_t number_ = 0;  // of the last request
    bool is_outstanding_ = false;
    bool may_spin_ = false;  // once for each request
    std::string ended_;
};

}  // namespace k3::transport
