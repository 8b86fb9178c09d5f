#include "tests/unit/common/transport/process.h"

#include <doctest/doctest.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstdlib>

#include "common/base/deadline.h"

namespace k3::transport::test {

PeerProcess::PeerProcess(const std::string& endpoint, const std::vector<std::string>& extra) {
    const char* root = std::getenv("K3_BUILD_ROOT");
    REQUIRE(root != nullptr);
    const std::string program =
        std::string(root) + "/tests/unit/common/transport/transport_test_peer";
    std::array<int, 2> lifeline{};
    std::array<int, 2> log{};
    REQUIRE(::pipe2(lifeline.data(), O_CLOEXEC) == 0);
    REQUIRE(::pipe2(log.data(), O_CLOEXEC) == 0);
    std::vector<std::string> arguments = {program, "--listen", endpoint};
    auto add_default = [&](const std::string& flag, const std::string& value) {
        if (std::find(extra.begin(), extra.end(), flag) == extra.end())
            arguments.insert(arguments.end(), {flag, value});
    };
    add_default("--run-id", "7e57");
    add_default("--lifeline-fd", std::to_string(lifeline[0]));
    arguments.insert(arguments.end(), extra.begin(), extra.end());
    std::vector<char*> argv;
    for (std::string& argument : arguments) argv.push_back(argument.data());
    argv.push_back(nullptr);
    pid_ = ::fork();
    REQUIRE(pid_ >= 0);
    if (pid_ == 0) {
        ::fcntl(lifeline[0], F_SETFD, 0);
        ::dup2(log[1], STDERR_FILENO);
        ::execv(argv[0], argv.data());
        ::_exit(127);
    }
    ::close(lifeline[0]);
    ::close(log[1]);
    lifeline_ = Fd(lifeline[1]);
    log_ = Fd(log[0]);
}

PeerProcess::~PeerProcess() {
    if (!status_) {
        ::kill(pid_, SIGKILL);
        ::waitpid(pid_, nullptr, 0);
    }
    ::shm_unlink(segment().c_str());  // a killed one leaves it, and no janitor comes here
}

void PeerProcess::signal(int number) const { ::kill(pid_, number); }

std::optional<int> PeerProcess::wait_for_exit(std::int64_t ms) {
    Deadline deadline = Deadline::after_ms(ms);
    while (!status_) {
        int status = 0;
        if (::waitpid(pid_, &status, WNOHANG) == pid_)
            status_ = WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
        else if (deadline.expired())
            return std::nullopt;
        else
            ::poll(nullptr, 0, 5);
    }
    return status_;
}

std::string PeerProcess::log() {
    std::string text;
    std::array<char, 4096> part{};
    for (ssize_t n = 0; (n = ::read(log_.get(), part.data(), part.size())) > 0;)
        text.append(part.data(), static_cast<std::size_t>(n));
    return text;
}

std::string PeerProcess::segment() const { return "/k3-7e57-peer-" + std::to_string(pid_); }

}  // namespace k3::transport::test
