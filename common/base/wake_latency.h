#pragma once
// Idle cores that come back at once, for as long as there is work.
//
// Two services that share a box wake each other twice a layer. A core that has gone to sleep takes
// its time to come back: some 30 us from a deep state of the hardware, and longer on a virtual
// machine, where the host has to schedule it again. Linux keeps all cores out of such states while
// a process holds /dev/cpu_dma_latency open with the latency it can stand written to it ("PM QoS",
// kernel admin guide); the request ends with the process. Opening it is up to root, or to whom the
// permissions of the device say. Who may not is no worse off than before.
//
// One thread uses it.

#include <filesystem>
#include <string>

#include "common/base/fd.h"

namespace k3 {

class WakeLatency {
  public:
    static constexpr const char* kDevice = "/dev/cpu_dma_latency";

    /// Asks for nothing yet. `device` is another file in tests only.
    explicit WakeLatency(std::filesystem::path device = kDevice) : device_(std::move(device)) {}

    /// There is work now. After the first call nothing but a comparison, until idle().
    void busy() noexcept {
        if (!held_.valid() && !refused_) ask();
    }
    /// There has been none for a while: cores may sleep deeply again.
    void idle() noexcept { held_ = Fd(); }

    bool held() const noexcept { return held_.valid(); }

  private:
    void ask() noexcept;

    std::filesystem::path device_;
    Fd held_;
    bool refused_ = false;
};

}  // namespace k3
