#pragma once
// A point in time by which a wait must end. Passed down instead of a timeout, so that a chain of
// waits shares one budget.

#include <algorithm>
#include <chrono>
#include <cstdint>

namespace k3 {

using Clock = std::chrono::steady_clock;

class Deadline {
  public:
    /// At most a year away: a "forever" in milliseconds must not overflow the clock.
    static Deadline after(std::chrono::milliseconds duration) {
        return Deadline(Clock::now() +
                        std::clamp<std::chrono::milliseconds>(duration, -kLongest, kLongest));
    }
    static Deadline after_ms(std::int64_t ms) { return after(std::chrono::milliseconds(ms)); }

    bool expired() const { return Clock::now() >= at_; }
    /// Milliseconds left, never negative, rounded up: a poll with it does not spin at the end.
    std::int64_t remaining_ms() const {
        auto left = std::chrono::ceil<std::chrono::milliseconds>(at_ - Clock::now()).count();
        return left > 0 ? left : 0;
    }
    Clock::time_point at() const { return at_; }
    /// The earlier of two.
    Deadline min(Deadline other) const { return Deadline(at_ < other.at_ ? at_ : other.at_); }

  private:
    static constexpr std::chrono::hours kLongest{24 * 365};
    explicit Deadline(Clock::time_point at) : at_(at) {}
    Clock::time_point at_;
};

}  // namespace k3
