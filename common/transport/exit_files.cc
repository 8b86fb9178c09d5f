#include "common/transport/exit_files.h"

#include <unistd.h>

#include <array>
#include <atomic>
#include <cstring>
#include <utility>

namespace k3::transport {

namespace {

enum State : int { vacant, filling, listed, removing };

struct Place {
    std::atomic<int> state{vacant};
    pid_t owner = 0;  // a forked child must not remove its parent's files
    std::array<char, 256> path{};
};

// Global because a signal handler has no other way to reach it; constant-initialised.
constinit std::array<Place, 256> g_places;

}  // namespace

ExitFile::ExitFile(const std::string& path) noexcept {
    if (path.size() >= Place{}.path.size()) return;  // longer ones do not occur: names are bounded
    for (std::size_t i = 0; i < g_places.size(); ++i) {
        Place& place = g_places[i];
        int expected = vacant;
        if (!place.state.compare_exchange_strong(expected, filling, std::memory_order_acquire))
            continue;
        place.owner = ::getpid();
        std::memcpy(place.path.data(), path.c_str(), path.size() + 1);
        place.state.store(listed, std::memory_order_release);
        place_ = i;
        return;
    }
}

ExitFile::ExitFile(ExitFile&& other) noexcept : place_(std::exchange(other.place_, kNone)) {}

ExitFile& ExitFile::operator=(ExitFile&& other) noexcept {
    std::swap(place_, other.place_);
    return *this;
}

ExitFile::~ExitFile() {
    if (place_ == kNone) return;
    // Fails only while exit_at_once() is removing it, and then the process ends anyway.
    int expected = listed;
    g_places[place_].state.compare_exchange_strong(expected, vacant, std::memory_order_release);
}

void exit_at_once(int code) noexcept {
    const pid_t self = ::getpid();
    for (Place& place : g_places) {
        int expected = listed;
        if (!place.state.compare_exchange_strong(expected, removing, std::memory_order_acquire))
            continue;
        if (place.owner == self) ::unlink(place.path.data());
    }
    ::_exit(code);
}

}  // namespace k3::transport
