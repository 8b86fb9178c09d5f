#include "common/transport/stop_signals.h"

#include <signal.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstdint>

#include "common/transport/exit_files.h"
#include "common/transport/server.h"

namespace k3::transport {

namespace {

// Signals belong to the process, so their state does too; constant-initialised.
constinit std::atomic<int> g_event{-1};
constinit std::atomic<int> g_first_signal{0};

extern "C" void on_stop_signal(int number) {
    const int saved = errno;
    int none = 0;
    if (!g_first_signal.compare_exchange_strong(none, number)) exit_at_once(128 + number);
    const std::uint64_t one = 1;
    // A full counter would mean that it is readable already.
    [[maybe_unused]] ssize_t n = ::write(g_event.load(), &one, sizeof(one));
    ::alarm(kForcedExitSeconds);
    errno = saved;
}

extern "C" void on_alarm(int) { exit_at_once(128 + g_first_signal.load()); }

void install(int number, void (*handler)(int)) {
    struct sigaction action {};
    action.sa_handler = handler;
    action.sa_flags = SA_RESTART;
    ::sigaction(number, &action, nullptr);
}

}  // namespace

int stop_signal_fd() noexcept { return g_event.load(); }

void install_stop_signals() {
    if (g_event.load() < 0) g_event.store(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
    install(SIGPIPE, SIG_IGN);
    install(SIGALRM, on_alarm);
    install(SIGTERM, on_stop_signal);
    install(SIGINT, on_stop_signal);
}

}  // namespace k3::transport
