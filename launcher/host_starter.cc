#include "launcher/host_starter.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <mutex>
#include <string_view>
#include <thread>
#include <utility>

#include "common/base/deadline.h"
#include "launcher/child.h"
#include "launcher/host_protocol.h"

namespace k3::launcher {

namespace {

constexpr std::int64_t kPushMs = 10;    // until a pipe that was full may take more
constexpr std::int64_t kObeyMs = 4000;  // from SIGKILL for a service to the end of its client

class HostStarter final : public ProcessStarter {
  public:
    HostStarter(std::unique_ptr<ProcessStarter> local, HostOptions options)
        : local_(std::move(local)), options_(std::move(options)), pulse_([this] { pulse(); }) {}

    /// Clients that still run have been given up: a box that does not react. With them the
    /// connections end, and what they ran stops by itself.
    ~HostStarter() override {
        {
            std::lock_guard lock(mutex_);
            stop_ = true;
        }
        wake_.notify_all();
        pulse_.join();
        for (auto& [pid, client] : clients_) {
            ::kill(-pid, SIGKILL);
            Process process;
            process.pid = pid;
            client.control.reset();
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
        const bool with_placement = uses_placement(command);
        if (with_placement) description.placement = options_.placement.string();
        DescriptionSizes sizes;
        if (with_keys) sizes.keys = transport::CurveKeys::kFileBytes;
        if (with_placement) sizes.placement = options_.placement_text.size();
        ASSIGN_OR_RETURN(const std::string text, encode_description(description, sizes));
        ASSIGN_OR_RETURN(Pipe pipe, make_pipe());
        ::fcntl(pipe.write.get(), F_SETFL, O_NONBLOCK);
        if (!send(pipe.write, text) || (with_keys && !send_keys(pipe.write)))
            return Error{
                ErrorCode::io,
                fmt::format("cannot hand {} to its box: {}", command.name, std::strerror(errno)),
                "raise the limit of memory in pipes (/proc/sys/fs/pipe-user-pages-soft)"};
        Client client;
        client.control = std::move(pipe.write);
        if (with_placement) client.unsent = options_.placement_text;
        ChildSpec child;
        child.name = command.name;
        child.argv = options_.remote->command(command.host, options_.host_stage.at(command.host));
        child.variables = environment_with({});
        child.input = pipe.read.get();
        ASSIGN_OR_RETURN(Process process, spawn_child(child));
        std::lock_guard lock(mutex_);
        clients_[process.pid] = std::move(client);
        wake_.notify_all();
        return process;
    }

    void signal(const Process& process, int number) noexcept override {
        if (!tell(process.pid, fmt::format("signal {}\n", number))) {
            local_->signal(process, number);
        } else if (number == SIGKILL) {
            // A box that does not react cannot obey, and not every client notices (srun waits for
            // what Slurm thinks of the node).
            std::lock_guard lock(mutex_);
            std::optional<Deadline>& patience = clients_[process.pid].patience;
            if (!patience.has_value()) patience = Deadline::after_ms(kObeyMs);
        }
    }

    void resume(const Process& process) noexcept override {
        if (!tell(process.pid, "resume\n")) local_->resume(process);
    }

    std::optional<Ending> reap(Process& process) noexcept override {
        const pid_t pid = process.pid;
        std::optional<Ending> ending = local_->reap(process);
        if (!ending.has_value()) return ending;
        std::lock_guard lock(mutex_);
        if (clients_.erase(pid) == 0 || ending->signalled) return ending;
        return relayed_ending(ending->number);
    }

    std::optional<Error> lost(const std::string& host) override {
        if (host.empty()) return std::nullopt;
        return options_.remote->lost();
    }

  private:
    /// A process here that speaks for a stage of another box.
    struct Client {
        Fd control;
        std::string unsent;                // of the placement, and what was said behind it
        std::optional<Deadline> patience;  // once its service has been told to die
    };

    bool uses_placement(const Command& command) const {
        if (options_.placement.empty()) return false;
        const std::string share = fmt::format("@{}#", options_.placement.string());
        return std::any_of(command.argv.begin(), command.argv.end(),
                           [&share](const std::string& word) { return word.starts_with(share); });
    }

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
        auto found = clients_.find(pid);
        if (found == clients_.end()) return false;
        Client& client = found->second;
        if (!client.unsent.empty())
            client.unsent += line;
        else [[maybe_unused]]
            ssize_t sent = ::write(client.control.get(), line.data(), line.size());
        return true;
    }

    /// As much as the pipe takes; true if something is left.
    static bool push(Client& client) noexcept {
        while (!client.unsent.empty()) {
            const ssize_t sent =
                ::write(client.control.get(), client.unsent.data(), client.unsent.size());
            if (sent < 0 && (errno == EAGAIN || errno == EINTR)) return true;
            client.unsent.erase(0, sent > 0 ? static_cast<std::size_t>(sent) : std::string::npos);
        }
        return false;
    }

    void pulse() {
        std::unique_lock lock(mutex_);
        Clock::time_point next = Clock::now();
        while (!stop_) {
            bool is_behind = false;
            for (auto& [pid, client] : clients_) is_behind = push(client) || is_behind;
            const Clock::time_point now = Clock::now();
            if (now >= next) {
                next = now + std::chrono::milliseconds(kPulseMs);
                for (auto& [pid, client] : clients_) {
                    if (client.patience.has_value() && client.patience->expired())
                        ::kill(-pid, SIGKILL);
                    if (!client.unsent.empty()) continue;
                    [[maybe_unused]] ssize_t sent = ::write(client.control.get(), "pulse\n", 6);
                }
            }
            const Clock::time_point soon = now + std::chrono::milliseconds(kPushMs);
            wake_.wait_until(lock, is_behind ? std::min(soon, next) : next);
        }
    }

    std::unique_ptr<ProcessStarter> local_;
    HostOptions options_;
    std::mutex mutex_;
    std::condition_variable wake_;
    bool stop_ = false;
    std::map<pid_t, Client> clients_;  // that run, by their process
    std::thread pulse_;                // last: it uses all of the above
};

}  // namespace

std::unique_ptr<ProcessStarter> make_host_starter(std::unique_ptr<ProcessStarter> local,
                                                  HostOptions options) {
    return std::make_unique<HostStarter>(std::move(local), std::move(options));
}

}  // namespace k3::launcher
