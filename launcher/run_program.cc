#include "launcher/run_program.h"

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <sys/sendfile.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>

#include "launcher/child.h"

namespace k3::launcher {

namespace {

constexpr std::int64_t kTurnMs = 50;
constexpr std::size_t kPiece = std::size_t{1} << 20U;

class Conversation {
  public:
    Conversation(Process process, Fd to, const std::vector<Fd>& input)
        : process_(std::move(process)), to_(std::move(to)), input_(input) {
        if (input_.empty()) to_.reset();
    }

    Result<ProgramRun> run(Deadline deadline, int stop_fd) {
        bool stopped = false;
        for (;;) {
            if (auto ending = reap_child(process_)) {
                while (read()) {
                }
                if (stopped) return Error{ErrorCode::cancelled, "interrupted", ""};
                run_.ending = *ending;
                return std::move(run_);
            }
            if (deadline.expired()) {
                run_.timed_out = true;
                ::kill(-process_.pid, SIGKILL);
            }
            pollfd fds[] = {{process_.exited.get(), POLLIN, 0},
                            {process_.output.get(), POLLIN, 0},
                            {to_.get(), POLLOUT, 0},
                            {stop_fd, POLLIN, 0}};
            ::poll(fds, std::size(fds), kTurnMs);
            if ((fds[3].revents & POLLIN) != 0) {
                stopped = true;
                ::kill(-process_.pid, SIGKILL);
            }
            while (read()) {
            }
            write();
        }
    }

  private:
    /// False when nothing is there now.
    bool read() {
        if (!process_.output.valid()) return false;
        std::array<char, 16384> buffer;
        const ssize_t got = ::read(process_.output.get(), buffer.data(), buffer.size());
        if (got == 0) process_.output.reset();
        if (got <= 0) return false;
        const std::size_t room = kMaxProgramOutput - run_.output.size();
        run_.output.append(buffer.data(), std::min(static_cast<std::size_t>(got), room));
        return true;
    }

    void write() {
        if (!to_.valid()) return;
        const ssize_t sent = ::sendfile(to_.get(), input_[next_].get(), nullptr, kPiece);
        if (sent == 0) ++next_;
        if (next_ == input_.size() || (sent < 0 && errno != EAGAIN && errno != EINTR)) to_.reset();
    }

    Process process_;
    Fd to_;
    const std::vector<Fd>& input_;
    std::size_t next_ = 0;
    ProgramRun run_;
};

}  // namespace

Result<ProgramRun> run_program(const std::vector<std::string>& argv, Deadline deadline, int stop_fd,
                               const std::vector<Fd>& input) {
    ASSIGN_OR_RETURN(Pipe pipe, make_pipe());
    ::fcntl(pipe.write.get(), F_SETFL, O_NONBLOCK);
    ChildSpec child;
    child.name = argv.front();
    child.argv = argv;
    child.variables = environment_with({});
    child.input = pipe.read.get();
    ASSIGN_OR_RETURN(Process process, spawn_child(child));
    pipe.read.reset();  // so that a write notices when the program has gone
    return Conversation(std::move(process), std::move(pipe.write), input).run(deadline, stop_fd);
}

}  // namespace k3::launcher
