#include "services/experts/limited_store.h"

#include <algorithm>
#include <chrono>
#include <thread>

namespace k3::experts {

/// When a read that is asked for now will be done.
Clock::time_point LimitedStore::reserve() {
    const std::chrono::duration<double> takes(static_cast<double>(record_bytes()) /
                                              static_cast<double>(bytes_per_s_));
    const std::lock_guard lock(mutex_);
    free_at_ =
        std::max(free_at_, Clock::now()) + std::chrono::duration_cast<Clock::duration>(takes);
    return free_at_;
}

Result<std::span<const std::byte>> LimitedStore::read(ExpertKey key, std::span<std::byte> slot) {
    const Clock::time_point done_at = reserve();
    auto record = store_->read(key, slot);
    std::this_thread::sleep_until(done_at);
    return record;
}

}  // namespace k3::experts
