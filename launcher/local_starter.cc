// make_local_starter of starter.h.

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
#include <filesystem>
#include <fstream>
#include <sstream>

#include "common/kernels/idle_threads.h"
#include "launcher/starter.h"

extern char** environ;

namespace k3::launcher {

namespace {

struct Pipe {
    Fd read;
    Fd write;
};

Result<Pipe> make_pipe() {
    std::array<int, 2> ends = {-1, -1};
    if (::pipe2(ends.data(), O_CLOEXEC) != 0)
        return Error{ErrorCode::io, fmt::format("cannot make a pipe: {}", std::strerror(errno)),
                     "raise the limit of open files (ulimit -n)"};
    return Pipe{Fd(ends[0]), Fd(ends[1])};
}

/// Everything the child needs, made before the fork: between fork and exec only system calls are
/// allowed, because other threads may hold locks at that moment.
struct Prepared {
    std::vector<std::string> words;
    std::vector<std::string> variables;
    std::vector<char*> argv;
    std::vector<char*> envp;
};

/// Our environment with the command's on top of it.
std::vector<std::string> environment_of(const Command& command) {
    std::vector<std::string> own;
    for (const auto& [name, value] : command.env) own.push_back(fmt::format("{}={}", name, value));
    std::vector<std::string> variables;
    for (char** entry = environ; *entry != nullptr; ++entry) {
        std::string_view text = *entry;
        bool replaced = std::any_of(command.env.begin(), command.env.end(), [&](const auto& pair) {
            return text.starts_with(fmt::format("{}=", pair.first));
        });
        if (!replaced) variables.emplace_back(text);
    }
    variables.insert(variables.end(), own.begin(), own.end());
    // Idle compute threads of one service would spin on the cores that the next one needs. It has
    // to be here, because their runtime reads it before main() (common/kernels/idle_threads.h).
    bool chosen = std::any_of(variables.begin(), variables.end(), [](const std::string& variable) {
        return std::any_of(
            kernels::kIdleThreads.begin(), kernels::kIdleThreads.end(),
            [&](const auto& pair) { return variable.starts_with(fmt::format("{}=", pair.first)); });
    });
    if (!chosen)
        for (const auto& [name, value] : kernels::kIdleThreads)
            variables.push_back(fmt::format("{}={}", name, value));
    return variables;
}

Prepared prepare(const Command& command, int lifeline) {
    Prepared prepared;
    prepared.words = command.argv;
    prepared.words.emplace_back("--lifeline-fd");
    prepared.words.push_back(std::to_string(lifeline));
    prepared.variables = environment_of(command);
    for (std::string& word : prepared.words) prepared.argv.push_back(word.data());
    for (std::string& variable : prepared.variables) prepared.envp.push_back(variable.data());
    prepared.argv.push_back(nullptr);
    prepared.envp.push_back(nullptr);
    return prepared;
}

struct ChildFds {
    int null;
    int output;
    int lifeline;
    int report;
};

[[noreturn]] void become(const Prepared& prepared, const ChildFds& fds, bool terminal) {
    ::setpgid(0, 0);
    for (int number : {SIGINT, SIGTERM, SIGHUP, SIGQUIT, SIGPIPE, SIGTSTP, SIGCHLD})
        ::signal(number, SIG_DFL);
    if (terminal) {
        ::signal(SIGTTOU, SIG_IGN);  // taking the terminal from the background would stop us
        ::tcsetpgrp(0, ::getpid());
    } else {
        ::dup2(fds.null, 0);
        ::dup2(fds.output, 1);
        ::dup2(fds.output, 2);
    }
    ::signal(SIGTTOU, SIG_DFL);
    sigset_t none;
    ::sigemptyset(&none);
    ::pthread_sigmask(SIG_SETMASK, &none, nullptr);
    ::fcntl(fds.lifeline, F_SETFD, 0);
    ::execve(prepared.argv[0], prepared.argv.data(), prepared.envp.data());
    int code = errno;
    [[maybe_unused]] ssize_t sent = ::write(fds.report, &code, sizeof code);
    ::_exit(127);
}

/// Members of a process group that are stopped (state T of proc(5), not t: traced).
std::vector<pid_t> stopped_members(pid_t group) {
    std::vector<pid_t> members;
    std::error_code unreadable;
    for (const auto& entry : std::filesystem::directory_iterator("/proc", unreadable)) {
        std::ifstream file(entry.path() / "stat");
        std::string line;
        if (!std::getline(file, line)) continue;
        // "pid (command) state parent group ...": the command may hold blanks and brackets.
        std::istringstream fields(line.substr(line.rfind(')') + 1));
        char state = 0;
        pid_t parent = 0;
        pid_t its_group = 0;
        if (fields >> state >> parent >> its_group && state == 'T' && its_group == group)
            members.push_back(std::stoi(line));
    }
    return members;
}

class LocalStarter final : public ProcessStarter {
  public:
    LocalStarter(Pipe lifeline, Fd null) : lifeline_(std::move(lifeline)), null_(std::move(null)) {}

    Result<Process> start(const Command& command) override {
        ASSIGN_OR_RETURN(Pipe output, make_pipe());
        ASSIGN_OR_RETURN(Pipe report, make_pipe());
        Prepared prepared = prepare(command, lifeline_.read.get());
        ChildFds fds{null_.get(), output.write.get(), lifeline_.read.get(), report.write.get()};
        pid_t pid = ::fork();
        if (pid < 0)
            return Error{ErrorCode::io,
                         fmt::format("cannot fork for {}: {}", command.name, std::strerror(errno)),
                         "raise the limit of processes (ulimit -u)"};
        if (pid == 0) become(prepared, fds, command.terminal);
        ::setpgid(pid, pid);  // also here: whoever comes first
        report.write.reset();
        output.write.reset();
        int code = 0;
        ssize_t got = 0;
        do {
            got = ::read(report.read.get(), &code, sizeof code);
        } while (got < 0 && errno == EINTR);
        if (got > 0) {
            while (::waitpid(pid, nullptr, 0) < 0 && errno == EINTR) {
            }
            return Error{ErrorCode::invalid_argument,
                         fmt::format("cannot start {}: {}: {}", command.name, command.argv.front(),
                                     std::strerror(code)),
                         "check that it is a program for this machine"};
        }
        Process process;
        process.pid = pid;
        process.exited = Fd(static_cast<int>(::syscall(SYS_pidfd_open, pid, 0)));
        if (!process.exited.valid()) {
            int reason = errno;
            ::kill(-pid, SIGKILL);
            while (::waitpid(pid, nullptr, 0) < 0 && errno == EINTR) {
            }
            return Error{ErrorCode::io,
                         fmt::format("cannot watch {}: {}", command.name, std::strerror(reason)),
                         "Linux 5.3 or newer is needed"};
        }
        if (!command.terminal) {
            process.output = std::move(output.read);
            ::fcntl(process.output.get(), F_SETFL, O_NONBLOCK);
        }
        return process;
    }

    void signal(const Process& process, int number) noexcept override {
        if (process.pid > 0) ::kill(-process.pid, number);
    }

    void resume(const Process& process) noexcept override {
        if (process.pid <= 0) return;
        for (pid_t pid : stopped_members(process.pid)) ::kill(pid, SIGCONT);
    }

    std::optional<Ending> reap(Process& process) noexcept override {
        siginfo_t info = {};
        int flags = WEXITED | WNOHANG;
        auto id = static_cast<id_t>(process.pid);
        if (::waitid(P_PID, id, &info, flags | WNOWAIT) != 0 || info.si_pid == 0)
            return std::nullopt;
        // The dead leader still holds its id: nobody else can be hit by this.
        ::kill(-process.pid, SIGKILL);
        ::waitid(P_PID, id, &info, flags);
        process.pid = -1;
        process.exited.reset();
        return Ending{info.si_code != CLD_EXITED, info.si_status};
    }

  private:
    Pipe lifeline_;
    Fd null_;
};

}  // namespace

std::string Ending::text() const {
    if (!signalled) return fmt::format("exit code {}", number);
    return fmt::format("signal {} ({})", number, ::strsignal(number));
}

Result<std::unique_ptr<ProcessStarter>> make_local_starter() {
    ASSIGN_OR_RETURN(Pipe lifeline, make_pipe());
    Fd null(::open("/dev/null", O_RDWR | O_CLOEXEC));
    if (!null.valid())
        return Error{ErrorCode::io, fmt::format("cannot open /dev/null: {}", std::strerror(errno)),
                     "repair the device"};
    return std::unique_ptr<ProcessStarter>(new LocalStarter(std::move(lifeline), std::move(null)));
}

}  // namespace k3::launcher
