#include "bench/futex_hop.h"

#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>
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

std::vector<double> futex_round_trips(std::size_t n, int there) {
    Doorbell out;
    Doorbell back;
    std::jthread other([&] {
        if (there >= 0) {
            cpu_set_t set;
            CPU_ZERO(&set);
            CPU_SET(there, &set);
            ::sched_setaffinity(0, sizeof(set), &set);
        }
        for (std::size_t i = 1; i <= n; ++i) {
            out.wait_for(static_cast<std::uint32_t>(i));
            back.ring();
        }
    });
    std::vector<double> us(n);
    for (std::size_t i = 0; i < n; ++i) {
        const double start = now();
        out.ring();
        back.wait_for(static_cast<std::uint32_t>(i + 1));
        us[i] = 1e6 * (now() - start);
    }
    return us;
}

}  // namespace k3::bench
