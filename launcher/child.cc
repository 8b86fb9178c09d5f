#include "launcher/child.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <signal.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>

extern char** environ;

namespace k3::launcher {

namespace {

/// Everything the child needs, made before the fork: between fork and exec only system calls are
/// allowed, because other threads may hold locks at that moment.
struct Prepared {
    std::vector<std::string> words;
    std::vector<std::string> variables;
    std::vector<char*> argv;
    std::vector<char*> envp;
};

void prepare(const ChildSpec& spec, Prepared* prepared) {
    prepared->words = spec.argv;
    prepared->variables = spec.variables;
    for (std::string& word : prepared->words) prepared->argv.push_back(word.data());
    for (std::string& variable : prepared->variables) prepared->envp.push_back(variable.data());
    prepared->argv.push_back(nullptr);
    prepared->envp.push_back(nullptr);
}

struct ChildFds {
    int input;
    int output;
    int report;
};

[[noreturn]] void become(const Prepared& prepared, const ChildFds& fds, const ChildSpec& spec) {
    ::setpgid(0, 0);
    for (int number : {SIGINT, SIGTERM, SIGHUP, SIGQUIT, SIGPIPE, SIGTSTP, SIGCHLD})
        ::signal(number, SIG_DFL);
    if (spec.terminal) {
        ::signal(SIGTTOU, SIG_IGN);  // taking the terminal from the background would stop us
        ::tcsetpgrp(0, ::getpid());
    } else {
        ::dup2(fds.input, 0);
        ::dup2(fds.output, 1);
        ::dup2(fds.output, 2);
    }
    ::signal(SIGTTOU, SIG_DFL);
    sigset_t none;
    ::sigemptyset(&none);
    ::pthread_sigmask(SIG_SETMASK, &none, nullptr);
    for (int fd : spec.inherited) ::fcntl(fd, F_SETFD, 0);
    ::execve(prepared.argv[0], prepared.argv.data(), prepared.envp.data());
    int code = errno;
    [[maybe_unused]] ssize_t sent = ::write(fds.report, &code, sizeof code);
    ::_exit(127);
}

void wait_for(pid_t pid) {
    while (::waitpid(pid, nullptr, 0) < 0 && errno == EINTR) {
    }
}

/// The errno of a failed exec; 0 once the child has become its program.
int exec_failure(int report) {
    int code = 0;
    ssize_t got = 0;
    do {
        got = ::read(report, &code, sizeof code);
    } while (got < 0 && errno == EINTR);
    return got > 0 ? code : 0;
}

}  // namespace

Result<Pipe> make_pipe() {
    std::array<int, 2> ends = {-1, -1};
    if (::pipe2(ends.data(), O_CLOEXEC) != 0)
        return Error{ErrorCode::io, fmt::format("cannot make a pipe: {}", std::strerror(errno)),
                     "raise the limit of open files (ulimit -n)"};
    return Pipe{Fd(ends[0]), Fd(ends[1])};
}

std::vector<std::string> environment_with(
    const std::vector<std::pair<std::string, std::string>>& env) {
    std::vector<std::string> variables;
    for (char** entry = environ; *entry != nullptr; ++entry) {
        std::string_view text = *entry;
        bool replaced = std::any_of(env.begin(), env.end(), [&](const auto& pair) {
            return text.starts_with(fmt::format("{}=", pair.first));
        });
        if (!replaced) variables.emplace_back(text);
    }
    for (const auto& [name, value] : env) variables.push_back(fmt::format("{}={}", name, value));
    return variables;
}

Result<Process> spawn_child(const ChildSpec& spec) {
    Fd null;
    if (spec.input < 0 && !spec.terminal) {
        null = Fd(::open("/dev/null", O_RDWR | O_CLOEXEC));
        if (!null.valid())
            return Error{ErrorCode::io,
                         fmt::format("cannot open /dev/null: {}", std::strerror(errno)),
                         "repair the device"};
    }
    ASSIGN_OR_RETURN(Pipe output, make_pipe());
    ASSIGN_OR_RETURN(Pipe report, make_pipe());
    Prepared prepared;
    prepare(spec, &prepared);
    ChildFds fds{spec.input < 0 ? null.get() : spec.input, output.write.get(), report.write.get()};
    pid_t pid = ::fork();
    if (pid < 0)
        return Error{ErrorCode::io,
                     fmt::format("cannot fork for {}: {}", spec.name, std::strerror(errno)),
                     "raise the limit of processes (ulimit -u)"};
    if (pid == 0) become(prepared, fds, spec);
    ::setpgid(pid, pid);  // also here: whoever comes first
    report.write.reset();
    output.write.reset();
    if (int code = exec_failure(report.read.get()); code != 0) {
        wait_for(pid);
        return Error{ErrorCode::invalid_argument,
                     fmt::format("cannot start {}: {}: {}", spec.name, spec.argv.front(),
                                 std::strerror(code)),
                     "check that it is a program for this machine"};
    }
    Process process;
    process.pid = pid;
    process.exited = Fd(static_cast<int>(::syscall(SYS_pidfd_open, pid, 0)));
    if (!process.exited.valid()) {
        int reason = errno;
        ::kill(-pid, SIGKILL);
        wait_for(pid);
        return Error{ErrorCode::io,
                     fmt::format("cannot watch {}: {}", spec.name, std::strerror(reason)),
                     "Linux 5.3 or newer is needed"};
    }
    if (!spec.terminal) {
        process.output = std::move(output.read);
        ::fcntl(process.output.get(), F_SETFL, O_NONBLOCK);
    }
    return process;
}

std::optional<Ending> reap_child(Process& process) noexcept {
    siginfo_t info = {};
    int flags = WEXITED | WNOHANG;
    auto id = static_cast<id_t>(process.pid);
    if (::waitid(P_PID, id, &info, flags | WNOWAIT) != 0 || info.si_pid == 0) return std::nullopt;
    // The dead leader still holds its id: nobody else can be hit by this.
    ::kill(-process.pid, SIGKILL);
    ::waitid(P_PID, id, &info, flags);
    process.pid = -1;
    process.exited.reset();
    return Ending{info.si_code != CLD_EXITED, info.si_status};
}

std::string Ending::text() const {
    if (!signalled) return fmt::format("exit code {}", number);
    return fmt::format("signal {} ({})", number, ::strsignal(number));
}

}  // namespace k3::launcher
