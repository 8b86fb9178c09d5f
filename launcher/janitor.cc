#include "launcher/janitor.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <ctime>
#include <set>
#include <string>
#include <vector>

#include "common/transport/arena.h"
#include "launcher/run_directory.h"

namespace k3::launcher {

namespace {

/// One message: written and read whole, pipes keep so few bytes together.
struct Note {
    char what;  // '+' watch, '-' forget, '.' farewell
    std::int32_t group;
};

constexpr long kCommandMs = 15000;

void sleep_ms(long ms) {
    timespec time{ms / 1000, (ms % 1000) * 1000000};
    ::nanosleep(&time, nullptr);
}

bool any_alive(const std::set<pid_t>& groups) {
    for (pid_t group : groups)
        if (::kill(-group, 0) == 0) return true;
    return false;
}

void kill_all(const std::set<pid_t>& groups) {
    for (pid_t group : groups) ::kill(-group, SIGKILL);
}

/// Ctrl-C and closing terminals concern the launcher; the janitor outlives it. It keeps the lock of
/// the run directory (inherited) and its end of the pipe, and nothing else: an open copy of the
/// launcher's output would keep readers of it waiting.
void detach(int pipe_fd, int lock_fd) {
    for (int signal : {SIGINT, SIGTERM, SIGHUP, SIGQUIT, SIGPIPE, SIGTSTP})
        ::signal(signal, SIG_IGN);
    ::setsid();
    ::prctl(PR_SET_NAME, "k3pipe-janitor");
    int null = ::open("/dev/null", O_RDWR);
    for (int fd : {0, 1, 2}) ::dup2(null, fd);
    unsigned first = 3;
    for (unsigned kept : std::set<unsigned>{unsigned(pipe_fd), unsigned(lock_fd)}) {
        if (kept > first) ::close_range(first, kept - 1, 0);
        first = std::max(first, kept + 1);
    }
    ::close_range(first, ~0U, 0);
}

/// To its end, but not for longer than kCommandMs.
void run_last_command(const Janitor::Options& options) {
    if (options.last_command.empty()) return;
    std::vector<char*> argv;
    for (const std::string& word : options.last_command)
        argv.push_back(const_cast<char*>(word.c_str()));
    argv.push_back(nullptr);
    const pid_t pid = ::fork();
    if (pid == 0) {
        ::execv(argv.front(), argv.data());
        ::_exit(127);
    }
    if (pid < 0) return;
    for (long waited = 0; ::waitpid(pid, nullptr, WNOHANG) == 0; waited += 20) {
        if (waited >= kCommandMs) ::kill(pid, SIGKILL);
        sleep_ms(20);
    }
}

[[noreturn]] void janitor_main(int pipe_fd, const Janitor::Options& options) {
    std::set<pid_t> groups;
    Note note = {};
    for (;;) {
        ssize_t got = ::read(pipe_fd, &note, sizeof note);
        if (got < 0 && errno == EINTR) continue;
        if (got != static_cast<ssize_t>(sizeof note)) break;  // the launcher is dead
        if (note.what == '.') ::_exit(0);
        if (note.what == '+') groups.insert(note.group);
        if (note.what == '-') groups.erase(note.group);
    }
    run_last_command(options);
    for (long waited = 0; waited < options.patience_ms && any_alive(groups); waited += 20)
        sleep_ms(20);
    const bool had_to_kill = any_alive(groups);
    kill_all(groups);
    for (int i = 0; i < 25 && any_alive(groups); ++i) sleep_ms(20);
    if (had_to_kill) run_last_command(options);  // what they did meanwhile
    if (options.shared_run)
        transport::sweep_dead_segments(options.run_id);
    else
        remove_segments(options.run_id);
    remove_run_directory(options.run_directory);
    ::_exit(0);
}

}  // namespace

Result<std::unique_ptr<Janitor>> Janitor::start(const Options& options, int lock_fd) {
    std::array<int, 2> ends = {-1, -1};
    if (::pipe2(ends.data(), O_CLOEXEC) != 0)
        return Error{ErrorCode::io, fmt::format("cannot make a pipe: {}", std::strerror(errno)),
                     "raise the limit of open files (ulimit -n)"};
    pid_t pid = ::fork();
    if (pid < 0) {
        int code = errno;
        ::close(ends[0]);
        ::close(ends[1]);
        return Error{ErrorCode::io, fmt::format("cannot fork: {}", std::strerror(code)),
                     "raise the limit of processes (ulimit -u)"};
    }
    if (pid == 0) {
        detach(ends[0], lock_fd);
        janitor_main(ends[0], options);
    }
    ::close(ends[0]);
    return std::unique_ptr<Janitor>(new Janitor(pid, Fd(ends[1])));
}

Janitor::~Janitor() {
    tell('.', 0);
    pipe_.reset();
    while (::waitpid(pid_, nullptr, 0) < 0 && errno == EINTR) {
    }
}

void Janitor::watch(pid_t group) noexcept { tell('+', group); }
void Janitor::forget(pid_t group) noexcept { tell('-', group); }

void Janitor::tell(char what, pid_t group) noexcept {
    Note note = {};
    note.what = what;
    note.group = group;
    // A janitor that was killed cannot be told, and nothing depends on it while we live.
    while (::write(pipe_.get(), &note, sizeof note) < 0 && errno == EINTR) {
    }
}

int remove_segments(std::uint64_t run_id) noexcept {
    int removed = 0;
    std::string prefix = fmt::format("k3-{:x}-", run_id);
    std::error_code code;
    std::vector<std::string> names;
    for (std::filesystem::directory_iterator it("/dev/shm", code), end; !code && it != end;
         it.increment(code))
        if (std::string name = it->path().filename().string(); name.starts_with(prefix))
            names.push_back("/" + name);
    for (const std::string& name : names)
        if (::shm_unlink(name.c_str()) == 0) ++removed;
    return removed;
}

}  // namespace k3::launcher
