// make_local_starter of starter.h.

#include <fmt/format.h>
#include <signal.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <sstream>

#include "common/kernels/idle_threads.h"
#include "launcher/child.h"
#include "launcher/starter.h"

namespace k3::launcher {

namespace {

/// Our environment with the command's on top of it.
std::vector<std::string> environment_of(const Command& command) {
    std::vector<std::string> variables = environment_with(command.env);
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
    explicit LocalStarter(Pipe lifeline) : lifeline_(std::move(lifeline)) {}

    Result<Process> start(const Command& command) override {
        ChildSpec child;
        child.name = command.name;
        child.argv = command.argv;
        child.argv.emplace_back("--lifeline-fd");
        child.argv.push_back(std::to_string(lifeline_.read.get()));
        child.variables = environment_of(command);
        child.inherited = command.inherited;
        child.inherited.push_back(lifeline_.read.get());
        child.terminal = command.terminal;
        return spawn_child(child);
    }

    void signal(const Process& process, int number) noexcept override {
        if (process.pid > 0) ::kill(-process.pid, number);
    }

    void resume(const Process& process) noexcept override {
        if (process.pid <= 0) return;
        for (pid_t pid : stopped_members(process.pid)) ::kill(pid, SIGCONT);
    }

    std::optional<Ending> reap(Process& process) noexcept override { return reap_child(process); }

  private:
    Pipe lifeline_;
};

}  // namespace

Result<std::unique_ptr<ProcessStarter>> make_local_starter() {
    ASSIGN_OR_RETURN(Pipe lifeline, make_pipe());
    return std::unique_ptr<ProcessStarter>(new LocalStarter(std::move(lifeline)));
}

}  // namespace k3::launcher
