#include "launcher/stop_signals.h"

#include <fmt/format.h>
#include <signal.h>
#include <sys/signalfd.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

namespace k3::launcher {

Result<StopSignals> StopSignals::take() {
    ::signal(SIGPIPE, SIG_IGN);
    ::signal(SIGTTOU, SIG_IGN);  // a debugger in front may own the terminal while we report
    sigset_t stop;
    ::sigemptyset(&stop);
    for (int number : {SIGINT, SIGTERM, SIGHUP}) ::sigaddset(&stop, number);
    ::pthread_sigmask(SIG_BLOCK, &stop, nullptr);
    Fd fd(::signalfd(-1, &stop, SFD_CLOEXEC | SFD_NONBLOCK));
    if (fd.valid()) return StopSignals(std::move(fd));
    return Error{ErrorCode::io, fmt::format("cannot make a signalfd: {}", std::strerror(errno)),
                 "raise the limit of open files (ulimit -n)"};
}

bool StopSignals::came() {
    signalfd_siginfo info = {};
    came_ = came_ || (fd_.valid() && ::read(fd_.get(), &info, sizeof info) > 0);
    return came_;
}

}  // namespace k3::launcher
