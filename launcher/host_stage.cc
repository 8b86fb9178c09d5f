#include "launcher/host_stage.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <poll.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <charconv>
#include <cstring>
#include <fstream>
#include <string>
#include <vector>

#include "common/base/deadline.h"
#include "common/base/log.h"
#include "common/transport/arena.h"
#include "launcher/host_protocol.h"
#include "launcher/janitor.h"
#include "launcher/out_of_memory.h"
#include "launcher/paths.h"
#include "launcher/run_directory.h"
#include "launcher/starter.h"
#include "launcher/stop_signals.h"

namespace k3::launcher {

namespace {

constexpr std::int64_t kDescriptionMs = 20000;  // for the launcher to say what to start
constexpr std::int64_t kStopGraceMs = 2500;     // between SIGTERM and SIGKILL
constexpr std::int64_t kLogGraceMs = 1000;      // for the last lines to leave
constexpr std::int64_t kTurnMs = 100;

/// Standard input as bytes that have arrived.
class Input {
  public:
    /// Reads what is there; false at its end.
    bool read() {
        std::array<char, 4096> buffer;
        const ssize_t got = ::read(STDIN_FILENO, buffer.data(), buffer.size());
        if (got > 0) bytes_.append(buffer.data(), static_cast<std::size_t>(got));
        return got > 0 || (got < 0 && (errno == EAGAIN || errno == EINTR));
    }
    /// The next line, without its end. Nothing while it is incomplete.
    std::optional<std::string> line() {
        const std::size_t end = bytes_.find('\n');
        if (end == std::string::npos) return std::nullopt;
        std::string line = bytes_.substr(0, end);
        bytes_.erase(0, end + 1);
        return line;
    }
    std::string block(std::size_t size) {
        std::string block = bytes_.substr(0, size);
        bytes_.erase(0, size);
        return block;
    }
    /// Writes the next bytes into a file and leaves no copy of them.
    bool move_to(const Fd& file, std::size_t size) {
        const bool written = ::write(file.get(), bytes_.data(), size) == static_cast<ssize_t>(size);
        ::explicit_bzero(bytes_.data(), size);
        bytes_.erase(0, size);
        return written;
    }
    std::size_t waiting() const noexcept { return bytes_.size(); }

  private:
    std::string bytes_;
};

Error no_description(const char* why) {
    return {ErrorCode::unavailable,
            fmt::format("the launcher {} before it had said what to start", why),
            "this program is started by k3pipe up on another box"};
}

/// The keys that follow a description, as a file of this process and its children alone.
Result<Fd> keep_keys(Input& input, std::size_t bytes) {
    Fd file(::memfd_create("k3pipe-keys", MFD_CLOEXEC));
    if (file.valid() && ::fchmod(file.get(), 0600) == 0 && input.move_to(file, bytes)) return file;
    return Error{ErrorCode::io, fmt::format("cannot keep the keys: {}", std::strerror(errno)),
                 "Linux 3.17 or newer is needed, and some memory"};
}

struct Received {
    StageDescription description;
    Fd keys;                // invalid: none are needed
    std::string placement;  // content; empty: none is needed
};

Result<Received> receive(Input& input, StopSignals& signals) {
    Deadline deadline = Deadline::after_ms(kDescriptionMs);
    std::optional<DescriptionSizes> size;
    for (;;) {
        if (!size.has_value()) {
            if (auto head = input.line()) {
                ASSIGN_OR_RETURN(size, parse_head(*head));
            } else if (input.waiting() > kMaxControlLine) {
                return parse_head("").error();
            }
        }
        if (size.has_value() && input.waiting() >= size->body + size->keys + size->placement) {
            Received received;
            ASSIGN_OR_RETURN(received.description, parse_description(input.block(size->body)));
            if (size->keys > 0) {
                ASSIGN_OR_RETURN(received.keys, keep_keys(input, size->keys));
            }
            received.placement = input.block(size->placement);
            return received;
        }
        if (deadline.expired()) return no_description("was silent");
        if (signals.came()) return no_description("was interrupted");
        pollfd fds[] = {{STDIN_FILENO, POLLIN, 0}, {signals.fd(), POLLIN, 0}};
        ::poll(fds, 2, static_cast<int>(std::min<std::int64_t>(deadline.remaining_ms(), 1000)));
        const std::size_t n_before = input.waiting();
        if ((fds[0].revents & (POLLIN | POLLHUP)) != 0 && !input.read())
            return no_description("hung up");
        if (input.waiting() > n_before) deadline = Deadline::after_ms(kDescriptionMs);
    }
}

/// The service's program and its wrapper as this box has them.
Status find_programs(StageDescription& description) {
    std::vector<std::size_t> programs = {description.n_wrap};
    if (description.n_wrap > 0) programs.push_back(0);
    for (std::size_t i : programs) {
        ASSIGN_OR_RETURN(const std::filesystem::path found,
                         find_program(description.argv[i], "program of " + description.stage));
        description.argv[i] = found.string();
    }
    if (!description.own_sessions) return Status::ok();
    if (const std::filesystem::path sessions = default_session_directory(); !sessions.empty()) {
        description.argv.emplace_back("--session-dir");
        description.argv.push_back(sessions.string());
    }
    return Status::ok();
}

/// Keeps a placement file in the stage's run directory, and calls it by that name.
Status keep_placement(const std::string& text, const std::filesystem::path& directory,
                      StageDescription& description) {
    if (description.placement.empty()) return Status::ok();
    const std::filesystem::path file = directory / "placement";
    std::ofstream out(file, std::ios::binary);
    out << text;
    out.close();
    if (!out)
        return Error{ErrorCode::io,
                     fmt::format("cannot write the placement to {}: {}", file.string(),
                                 std::strerror(errno)),
                     "make room there, or set XDG_RUNTIME_DIR on that box"};
    const std::string theirs = fmt::format("@{}#", description.placement);
    const std::string ours = fmt::format("@{}#", file.string());
    for (std::string& word : description.argv)
        if (word.starts_with(theirs)) word.replace(0, theirs.size(), ours);
    return Status::ok();
}

/// The conversation while the service runs.
class Relay {
  public:
    Relay(ProcessStarter& starter, Process process, Input& input, StopSignals& signals)
        : starter_(starter), process_(std::move(process)), input_(input), signals_(signals) {}

    /// Returns when the service has ended, and its output has gone or cannot go.
    Ending run() {
        for (;;) {
            if (auto ending = starter_.reap(process_)) return finish(*ending);
            obey_lines();
            if (Clock::now() - heard_at_ > std::chrono::milliseconds(kSilenceMs))
                begin_stop(
                    fmt::format("the launcher has not been heard of for {} s", kSilenceMs / 1000));
            if (signals_.came()) begin_stop("this box asked for it");
            if (stop_at_.has_value() && stop_at_->expired()) starter_.signal(process_, SIGKILL);
            wait();
        }
    }

  private:
    void obey_lines() {
        while (auto line = input_.line()) {
            heard_at_ = Clock::now();
            if (line->starts_with("signal ")) {
                int number = 0;
                const char* end = line->data() + line->size();
                auto [stop, bad] = std::from_chars(line->data() + 7, end, number);
                if (bad == std::errc{} && stop == end && number > 0 && number < 32)
                    starter_.signal(process_, number);
            } else if (*line == "resume") {
                starter_.resume(process_);
            }
        }
        if (input_.waiting() > kMaxControlLine) begin_stop("the launcher talks nonsense");
    }

    void begin_stop(const std::string& why) {
        if (stop_at_.has_value()) return;
        // Who still reads this would wonder about an end without a reason.
        if (input_open_)
            log::warn(fmt::format("stopping: {}", why));
        else
            log::info(fmt::format("stopping: {}", why));
        stop_at_ = Deadline::after_ms(kStopGraceMs);
        starter_.signal(process_, SIGTERM);
        starter_.resume(process_);
    }

    /// Until something happens, or for a moment. While the way out is full nothing more is taken
    /// from the service.
    void wait() {
        pollfd fds[] = {{input_open_ ? STDIN_FILENO : -1, POLLIN, 0},
                        {process_.exited.get(), POLLIN, 0},
                        {signals_.fd(), POLLIN, 0},
                        {unsent_.empty() ? process_.output.get() : -1, POLLIN, 0},
                        {unsent_.empty() ? -1 : STDOUT_FILENO, POLLOUT, 0}};
        ::poll(fds, std::size(fds), kTurnMs);
        if (input_open_ && (fds[0].revents & (POLLIN | POLLHUP | POLLERR)) != 0) {
            input_open_ = input_.read();
            if (!input_open_) begin_stop("the launcher has hung up");
        }
        pass_on();
    }

    /// One piece of the service's output; false if there was none to take.
    bool pass_on() {
        if (unsent_.empty() && process_.output.valid()) {
            std::array<char, 16384> buffer;
            const ssize_t got = ::read(process_.output.get(), buffer.data(), buffer.size());
            if (got == 0) process_.output.reset();
            if (got > 0) unsent_.assign(buffer.data(), static_cast<std::size_t>(got));
        }
        if (unsent_.empty()) return false;
        const ssize_t sent = ::write(STDOUT_FILENO, unsent_.data(), unsent_.size());
        if (sent > 0) unsent_.erase(0, static_cast<std::size_t>(sent));
        // Nobody reads any more: the service must not wait for it.
        if (sent < 0 && errno != EAGAIN && errno != EINTR) unsent_.clear();
        return true;
    }

    /// What the service said last is why it ended.
    Ending finish(const Ending& ending) {
        const Deadline deadline = Deadline::after_ms(kLogGraceMs);
        while (!deadline.expired() && pass_on()) {
            if (unsent_.empty()) continue;
            pollfd out = {STDOUT_FILENO, POLLOUT, 0};
            ::poll(&out, 1, kTurnMs);
        }
        return ending;
    }

    ProcessStarter& starter_;
    Process process_;
    Input& input_;
    StopSignals& signals_;
    bool input_open_ = true;
    std::string unsent_;
    Clock::time_point heard_at_ = Clock::now();
    std::optional<Deadline> stop_at_;  // when patience ends
};

Result<Ending> serve() {
    // Before any thread, as the janitor's fork wants it.
    ASSIGN_OR_RETURN(StopSignals signals, StopSignals::take());
    for (int fd : {STDIN_FILENO, STDOUT_FILENO})
        ::fcntl(fd, F_SETFL, ::fcntl(fd, F_GETFL) | O_NONBLOCK);
    Input input;
    ASSIGN_OR_RETURN(Received received, receive(input, signals));
    StageDescription& description = received.description;
    const std::string run = fmt::format("{:x}", description.run_id);
    log::init(description.stage, run, log::Level::info);
    RETURN_IF_ERROR(find_programs(description));
    // A base of its own: what runs here is another box's pipeline, and no business of `status`.
    const std::filesystem::path base = run_base({}).string() + "-stages";
    ASSIGN_OR_RETURN(
        auto directory,
        RunDirectory::acquire(base, fmt::format("{}-{}-{}", description.stage, run, ::getpid())));
    RETURN_IF_ERROR(keep_placement(received.placement, directory->path(), description));
    sweep_dead_runs(base);
    transport::sweep_dead_segments();
    ASSIGN_OR_RETURN(auto janitor, Janitor::start({.run_directory = directory->path(),
                                                   .run_id = description.run_id,
                                                   .shared_run = true},
                                                  directory->lock_fd()));
    ASSIGN_OR_RETURN(auto starter, make_local_starter());
    Command command;
    command.name = description.stage;
    command.argv = description.argv;
    command.env = description.env;
    if (received.keys.valid()) {
        command.inherited = {received.keys.get()};
        command.argv.emplace_back("--keys");
        command.argv.push_back(fmt::format("/proc/self/fd/{}", received.keys.get()));
    }
    ASSIGN_OR_RETURN(Process process, starter->start(command));
    const pid_t group = process.pid;
    janitor->watch(group);
    OutOfMemoryWatch out_of_memory;
    Relay relay(*starter, std::move(process), input, signals);
    const Ending ending = relay.run();
    // The launcher's own box knows nothing of this one's memory.
    if (ending.signalled && ending.number == SIGKILL && out_of_memory.has_grown())
        log::error("was killed" + out_of_memory.explain());
    janitor->forget(group);
    transport::sweep_dead_segments(description.run_id);
    directory.reset();  // before the janitor, who removes it if we are killed
    return ending;
}

}  // namespace

int host_stage() {
    log::init("host-stage", "", log::Level::info);
    auto ending = serve();
    if (ending.has_value()) return relayed_code(*ending);
    log::error(ending.error().sentence());
    return exit_code(ending.error().code);
}

}  // namespace k3::launcher
