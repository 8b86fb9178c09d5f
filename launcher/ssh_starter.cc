#include "launcher/ssh_starter.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <signal.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <mutex>
#include <string_view>
#include <thread>
#include <utility>

#include "launcher/child.h"
#include "launcher/host_protocol.h"
#include "launcher/ssh_command.h"

namespace k3::launcher {

namespace {

class SshStarter final : public ProcessStarter {
  public:
    SshStarter(std::unique_ptr<ProcessStarter> local, SshOptions options)
        : local_(std::move(local)), options_(std::move(options)), pulse_([this] { pulse(); }) {}

    /// Clients that still run have been given up: a box that does not react. With them the
    /// connections end, and what they ran stops by itself.
    ~SshStarter() override {
        {
            std::lock_guard lock(mutex_);
            stop_ = true;
        }
        wake_.notify_all();
        pulse_.join();
        for (auto& [pid, control] : controls_) {
            ::kill(-pid, SIGKILL);
            Process process;
            process.pid = pid;
            control.reset();
            while (!reap_child(process).has_value())
                std::this_thread::sleep_for(std::chrono::milliseconds(1));
        }
    }

    Result<Process> start(const Command& command) override {
        if (command.host.empty()) return local_->start(command);
        StageDescription description;
        description.pipeline = options_.pipeline;
        description.stage = command.name;
        description.run_id = options_.run_id;
        description.argv = command.argv;
        description.n_wrap = command.n_wrap;
        description.env = command.env;
        description.own_sessions = command.own_sessions;
        const bool with_keys = command.with_keys && options_.keys != nullptr;
        ASSIGN_OR_RETURN(
            const std::string text,
            encode_description(description, with_keys ? transport::CurveKeys::kFileBytes : 0));
        ASSIGN_OR_RETURN(Pipe control, make_pipe());
        ::fcntl(control.write.get(), F_SETFL, O_NONBLOCK);
        if (!send(control.write, text) || (with_keys && !send_keys(control.write)))
            return Error{
                ErrorCode::io,
                fmt::format("cannot hand {} to ssh: {}", command.name, std::strerror(errno)),
                "raise the limit of memory in pipes (/proc/sys/fs/pipe-user-pages-soft)"};
        ChildSpec child;
        child.name = command.name;
        child.argv = ssh_command(options_.ssh, command.host, options_.host_stage.at(command.host));
        child.variables = environment_with({});
        child.input = control.read.get();
        ASSIGN_OR_RETURN(Process process, spawn_child(child));
        std::lock_guard lock(mutex_);
        controls_[process.pid] = std::move(control.write);
        return process;
    }

    void signal(const Process& process, int number) noexcept override {
        if (!tell(process.pid, fmt::format("signal {}\n", number))) local_->signal(process, number);
    }

    void resume(const Process& process) noexcept override {
        if (!tell(process.pid, "resume\n")) local_->resume(process);
    }

    std::optional<Ending> reap(Process& process) noexcept override {
        const pid_t pid = process.pid;
        std::optional<Ending> ending = local_->reap(process);
        if (!ending.has_value()) return ending;
        std::lock_guard lock(mutex_);
        if (controls_.erase(pid) == 0 || ending->signalled) return ending;
        return relayed_ending(ending->number);
    }

  private:
    /// A new pipe takes all of it at once, or none.
    static bool send(const Fd& to, std::string_view text) noexcept {
        return ::write(to.get(), text.data(), text.size()) == static_cast<ssize_t>(text.size());
    }

    bool send_keys(const Fd& to) const noexcept {
        std::array<char, transport::CurveKeys::kFileBytes> text;
        options_.keys->write(text);
        const bool sent = send(to, {text.data(), text.size()});
        ::explicit_bzero(text.data(), text.size());
        return sent;
    }

    /// False if that process is not a client of ours. A line that a full pipe does not take is
    /// lost: the link is dead then, and its ends will notice.
    bool tell(pid_t pid, const std::string& line) noexcept {
        std::lock_guard lock(mutex_);
        auto found = controls_.find(pid);
        if (found == controls_.end()) return false;
        [[maybe_unused]] ssize_t sent = ::write(found->second.get(), line.data(), line.size());
        return true;
    }

    void pulse() {
        std::unique_lock lock(mutex_);
        while (!wake_.wait_for(lock, std::chrono::milliseconds(kPulseMs), [this] { return stop_; }))
            for (auto& [pid, control] : controls_) {
                [[maybe_unused]] ssize_t sent = ::write(control.get(), "pulse\n", 6);
            }
    }

    std::unique_ptr<ProcessStarter> local_;
    SshOptions options_;
    std::mutex mutex_;
    std::condition_variable wake_;
    bool stop_ = false;
    std::map<pid_t, Fd> controls_;  // of the clients that run, by their process
    std::thread pulse_;             // last: it uses all of the above
};

}  // namespace

std::unique_ptr<ProcessStarter> make_ssh_starter(std::unique_ptr<ProcessStarter> local,
                                                 SshOptions options) {
    return std::make_unique<SshStarter>(std::move(local), std::move(options));
}

}  // namespace k3::launcher
