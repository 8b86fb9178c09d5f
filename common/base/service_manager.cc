#include "common/base/service_manager.h"

#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <charconv>
#include <cstddef>
#include <cstdlib>
#include <cstring>

namespace k3 {

namespace {

constexpr std::chrono::seconds kTellEvery{1};
constexpr const char* kTwoMinutes = "EXTEND_TIMEOUT_USEC=120000000\n";

/// 0 if the variable is not there or no number.
std::uint64_t number_in(const char* variable) {
    const char* text = std::getenv(variable);
    std::uint64_t number = 0;
    if (text != nullptr) std::from_chars(text, text + std::strlen(text), number);
    return number;
}

/// One line of it: a line feed would begin another message.
std::string status(std::string_view text) {
    std::string line = "STATUS=";
    for (char c : text) line += static_cast<unsigned char>(c) < 0x20 ? ' ' : c;
    return line + "\n";
}

}  // namespace

ServiceManager ServiceManager::from_environment() {
    ServiceManager manager;
    const char* place = std::getenv("NOTIFY_SOCKET");
    const std::size_t size = place == nullptr ? 0 : std::strlen(place);
    if (size < 2 || size >= sizeof(sockaddr_un::sun_path) || (*place != '/' && *place != '@'))
        return manager;
    manager.address_ = place;
    if (*place == '@') manager.address_.front() = '\0';
    manager.socket_ = Fd(::socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
    const std::uint64_t watched = number_in("WATCHDOG_PID");
    if (watched == 0 || watched == static_cast<std::uint64_t>(::getpid()))
        manager.alive_every_ = std::chrono::microseconds(number_in("WATCHDOG_USEC") / 2);
    return manager;
}

void ServiceManager::loading(std::uint32_t permille, std::string_view detail) {
    const Clock::time_point now = Clock::now();
    if (!is_there() || now - told_at_ < kTellEvery) return;
    std::string text = "loading " + std::to_string(permille / 10) + " %";
    if (!detail.empty()) text.append(", ").append(detail);
    const std::string progress = std::to_string(permille) + text;
    if (progress == told_) return;
    told_ = progress;
    told_at_ = now;
    say(kTwoMinutes + status(text));
}

void ServiceManager::ready() { say("READY=1\n" + status("ready")); }

void ServiceManager::failed(std::string_view sentence) { say(status(sentence)); }

void ServiceManager::stopping() { say("STOPPING=1\n" + status("stopping")); }

void ServiceManager::alive(Clock::time_point now) {
    if (alive_every_.count() == 0 || now < alive_at_) return;
    alive_at_ = now + alive_every_;
    say("WATCHDOG=1\n");
}

/// A manager that does not listen is its own trouble: the service goes on.
void ServiceManager::say(const std::string& lines) const noexcept {
    if (!is_there()) return;
    sockaddr_un to = {};
    to.sun_family = AF_UNIX;
    std::copy(address_.begin(), address_.end(), to.sun_path);
    const bool abstract = address_.front() == '\0';
    const auto size = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + address_.size() +
                                             (abstract ? 0 : 1));
    [[maybe_unused]] ssize_t sent = ::sendto(socket_.get(), lines.data(), lines.size(),
                                             MSG_NOSIGNAL, reinterpret_cast<sockaddr*>(&to), size);
}

}  // namespace k3
