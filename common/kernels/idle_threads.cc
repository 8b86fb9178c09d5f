#include "common/kernels/idle_threads.h"

#include <unistd.h>

#include <array>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <string>

namespace k3::kernels {

namespace {

bool is_traced() {
    std::ifstream file("/proc/self/status");
    for (std::string line; std::getline(file, line);)
        if (line.starts_with("TracerPid:"))
            return line.find_first_of("123456789") != std::string::npos;
    return false;
}

bool is_in_valgrind() {
    const char* preload = std::getenv("LD_PRELOAD");
    return preload != nullptr && std::strstr(preload, "vgpreload") != nullptr;
}

}  // namespace

void let_idle_threads_sleep(char* const* argv) noexcept {
    for (const auto& [name, value] : kIdleThreads)
        if (std::getenv(name) != nullptr) return;
    // Enough for LLVM's runtime, which reads its variable at the first parallel section.
    for (const auto& [name, value] : kIdleThreads) ::setenv(name, value, 1);
    if (is_traced() || is_in_valgrind()) return;
    // Not by the name /proc/self/exe itself: the process would be called "exe" then.
    std::array<char, 4096> path{};
    const ssize_t length = ::readlink("/proc/self/exe", path.data(), path.size() - 1);
    if (length > 0) ::execv(path.data(), argv);
}

}  // namespace k3::kernels
