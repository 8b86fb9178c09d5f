#include "launcher/out_of_memory.h"

#include <fmt/format.h>

#include <fstream>
#include <string>
#include <utility>

#include "common/base/memory.h"
#include "common/base/settings.h"

namespace k3::launcher {

OutOfMemoryWatch::OutOfMemoryWatch(const std::filesystem::path& root) : root_(root) {
    for (const MemoryCgroup& group : memory_cgroups(root)) {
        const char* name = group.version == 2 ? "memory.events" : "memory.oom_control";
        // In a container /proc names a group that only the host sees; its own is the mount itself.
        const std::filesystem::path own = group.directory() / name;
        files_.push_back(std::filesystem::exists(own) ? own : group.mount / name);
    }
    seen_ = count();
}

bool OutOfMemoryWatch::has_grown() {
    const std::uint64_t n = count();
    return n > std::exchange(seen_, n);
}

std::string OutOfMemoryWatch::explain() const {
    std::string text = " by the kernel, which had no memory left";
    if (auto limit = memory_limit(root_); limit.has_value())
        text += fmt::format(" (all of {} according to {} is taken)", format_bytes(limit->bytes),
                            limit->limited_by);
    return text + ": give it a smaller budget (cache_bytes, weights_bytes)";
}

std::uint64_t OutOfMemoryWatch::count() const {
    std::uint64_t total = 0;
    for (const std::filesystem::path& path : files_) {
        std::ifstream file(path);
        std::string key;
        std::uint64_t value = 0;
        while (file >> key >> value)
            if (key == "oom_kill") total += value;
    }
    return total;
}

}  // namespace k3::launcher
