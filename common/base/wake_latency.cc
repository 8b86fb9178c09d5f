#include "common/base/wake_latency.h"

#include <fcntl.h>
#include <unistd.h>

#include <array>
#include <cstdint>
#include <string_view>

namespace k3 {

namespace {

/// 2 us is the lightest sleep of real cores. A virtual machine has only one, halting, which counts
/// as 1 us whatever the host makes of it; with 0 its idle cores look around for work instead.
std::int32_t tolerable_us() noexcept {
    constexpr std::string_view kHaltpoll = "haltpoll";
    const Fd fd(::open("/sys/devices/system/cpu/cpuidle/current_driver", O_RDONLY | O_CLOEXEC));
    std::array<char, kHaltpoll.size()> driver = {};
    const bool read = fd.valid() && ::read(fd.get(), driver.data(), driver.size()) > 0;
    return read && std::string_view(driver.data(), driver.size()) == kHaltpoll ? 0 : 2;
}

}  // namespace

void WakeLatency::ask() noexcept {
    const std::int32_t microseconds = tolerable_us();
    held_ = Fd(::open(device_.c_str(), O_WRONLY | O_CLOEXEC));
    if (held_.valid() &&
        ::write(held_.get(), &microseconds, sizeof(microseconds)) != sizeof(microseconds))
        held_ = Fd();
    refused_ = !held_.valid();
}

}  // namespace k3
