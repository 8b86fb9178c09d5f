#pragma once
// Which hints have had their calls.
//
// A call in a fast lane can overtake its hint, which takes the socket. What such a hint names is
// being read or has been used and perhaps let go: reading it again would cost the disk, and a slot
// that the next layer needs.

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>

namespace k3::experts {

/// Numbers of hints (proto/experts.capnp) that the last calls were for. A hint that comes later
/// than so many calls is taken for a new one, which costs a read.
class CalledHints {
  public:
    static constexpr std::size_t kRemembered = 64;

    /// A call for this hint has come; 0: for none.
    void add(std::uint64_t number) noexcept {
        if (number == 0 || has(number)) return;  // several calls of one step may be for one hint
        numbers_[next_] = number;
        next_ = (next_ + 1) % kRemembered;
    }
    bool has(std::uint64_t number) const noexcept {
        return number != 0 && std::find(numbers_.begin(), numbers_.end(), number) != numbers_.end();
    }

  private:
    std::array<std::uint64_t, kRemembered> numbers_{};  // 0: none yet
    std::size_t next_ = 0;                              // the oldest
};

}  // namespace k3::experts
