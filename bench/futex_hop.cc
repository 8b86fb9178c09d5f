#include "bench/futex_hop.h"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>
#include <string>
#include <thread>

#include "bench/machine.h"

namespace k3::bench {

namespace {

/// Rung by one thread, slept on by one other.
class Doorbell {
  public:
    void ring() noexcept {
        word_.fetch_add(1);
        ::syscall(SYS_futex, &word_, FUTEX_WAKE, 1, nullptr, nullptr, 0);
    }
    void wait_for(std::uint32_t number) noexcept {
        for (std::uint32_t seen = word_; seen != number; seen = word_)
            ::syscall(SYS_futex, &word_, FUTEX_WAIT, seen, nullptr, nullptr, 0);
    }

  private:
    std::atomic<std::uint32_t> word_{0};
};

}  // namespace

Result<std::vector<double>> futex_round_trips(std::size_t n, const CoreSet& ends) {
    Doorbell out;
    Doorbell back;
    Status there;
    std::jthread other([&] {
        if (!ends.empty()) there = keep_to_cores(std::to_string(ends.back()));
        for (std::size_t i = 1; i <= n; ++i) {
            out.wait_for(static_cast<std::uint32_t>(i));
            back.ring();
        }
    });
    Status here;
    if (!ends.empty()) here = keep_to_cores(std::to_string(ends.front()));
    std::vector<double> us(n);
    for (std::size_t i = 0; i < n; ++i) {
        const double start = now();
        out.ring();
        back.wait_for(static_cast<std::uint32_t>(i + 1));
        us[i] = 1e6 * (now() - start);
    }
    other.join();
    RETURN_IF_ERROR(here);
    RETURN_IF_ERROR(there);
    return us;
}

}  // namespace k3::bench
