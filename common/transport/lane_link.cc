#include "common/transport/lane_link.h"

#include <algorithm>
#include <chrono>
#include <utility>

namespace k3::transport {

Result<std::unique_ptr<LaneLink>> LaneLink::open(const msg::LaneOffer& offer) {
    ASSIGN_OR_RETURN(LaneSegment segment, LaneSegment::open(offer));
    return std::unique_ptr<LaneLink>(new LaneLink(std::move(segment), offer));
}

LaneLink::LaneLink(LaneSegment segment, const msg::LaneOffer& offer)
    : segment_(std::move(segment)),
      request_(segment_.request(offer.index)),
      reply_(segment_.reply(offer.index)),
      token_(offer.token) {}

bool LaneLink::end(std::string reason) {
    ended_ = std::move(reason);
    return false;
}

bool LaneLink::takes(std::size_t request_bytes, std::size_t reply_bytes) const noexcept {
    return ended_.empty() && !is_outstanding_ && request_.fits(request_bytes) &&
           reply_.fits(reply_bytes);
}

SendOutcome LaneLink::send(msg::Bytes& envelope, std::vector<msg::Bytes>& frames) {
    if (!ended_.empty()) return SendOutcome::unreachable;
    if (is_outstanding_ || frames.size() > kMaxLaneFrames ||
        !request_.fits(LaneSlot::size_of(envelope, frames)))
        return SendOutcome::would_block;
    if (++number_ == 0) ++number_;
    request_.head().spin_us = spin_us_;
    request_.put(number_, token_, envelope, frames);
    set_and_wake(segment_.bell(), 1);
    is_outstanding_ = may_spin_ = true;
    return SendOutcome::sent;
}

bool LaneLink::receive(Incoming& message) {
    if (!is_outstanding_ || !ended_.empty()) return false;
    const std::uint32_t answered = reply_.head().number.value.load(std::memory_order_acquire);
    if (answered != number_) {
        // If somebody else writes here, the request may be lost, and nothing would ever come.
        const std::uint32_t asked = request_.head().number.value.load();
        const bool is_sane = asked == number_ && (answered == number_ - 1 || answered == 0);
        return is_sane ? false : end("was overwritten");
    }
    const Status taken = reply_.take(number_, envelope_, message);
    if (!taken.has_value()) return end("is damaged (" + taken.error().message + ")");
    if (reply_.head().token != token_) return end("was given to somebody else");
    is_outstanding_ = false;
    return true;
}

void LaneLink::wait(Deadline deadline, bool) {
    if (!is_outstanding_ || !ended_.empty()) return;
    LaneWord& answered = reply_.head().number;
    const std::uint32_t before = answered.value.load();
    if (before == number_) return;
    if (std::exchange(may_spin_, false) && spin_us_ > 0) {
        const auto until = Clock::now() + std::chrono::microseconds(spin_us_);
        spin_on(answered, before, std::min(until, deadline.at()));
        if (answered.value.load() != before) return;
    }
    sleep_on(answered, before, deadline.min(Deadline::after_ms(kLaneSleepMs)));
}

}  // namespace k3::transport
