#pragma once
// Named counters of one service: added to by any thread, read by the connection thread.

#include <atomic>
#include <cstdint>
#include <deque>
#include <string>
#include <utility>
#include <vector>

#include "common/transport/messages/control.h"

namespace k3::telemetry {

class Counters {
  public:
    /// Declared before threads start; the reference stays valid. Unit last: "read_bytes".
    std::atomic<std::uint64_t>& add(std::string name) {
        auto& entry = entries_.emplace_back();
        entry.first = std::move(name);
        return entry.second;
    }
    std::vector<msg::Counter> snapshot() const {
        std::vector<msg::Counter> out;
        out.reserve(entries_.size());
        for (const auto& [name, value] : entries_)
            out.push_back({name, value.load(std::memory_order_relaxed)});
        return out;
    }

  private:
    std::deque<std::pair<std::string, std::atomic<std::uint64_t>>> entries_;
};

}  // namespace k3::telemetry
