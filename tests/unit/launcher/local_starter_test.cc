// The environment of a started process, and who is continued.

#include <doctest/doctest.h>
#include <poll.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "launcher/starter.h"

using namespace k3;
using namespace k3::launcher;

namespace {

/// Sets a variable of this process, or unsets it, and puts the old value back at the end.
class Variable {
  public:
    Variable(const char* name, const std::optional<std::string>& value) : name_(name) {
        if (const char* old = std::getenv(name); old != nullptr) old_ = old;
        put(value);
    }
    ~Variable() { put(old_); }
    Variable(const Variable&) = delete;
    Variable& operator=(const Variable&) = delete;

  private:
    void put(const std::optional<std::string>& value) const {
        if (value.has_value())
            ::setenv(name_, value->c_str(), 1);
        else
            ::unsetenv(name_);
    }
    const char* name_;
    std::optional<std::string> old_;
};

bool is_readable(const Fd& fd) {
    pollfd wait{fd.get(), POLLIN, 0};
    return ::poll(&wait, 1, 20000) == 1;
}

/// What it prints until `word` is among it; an empty one: until it ends.
std::string output_until(const Process& process, const std::string& word) {
    std::string text;
    char buffer[256];
    while (word.empty() || text.find(word) == std::string::npos) {
        REQUIRE_MESSAGE(is_readable(process.output), "after " << text);
        ssize_t got = ::read(process.output.get(), buffer, sizeof buffer);
        if (got <= 0) break;
        text.append(buffer, static_cast<std::size_t>(got));
    }
    return text;
}

Command shell(const std::string& script) {
    Command command;
    command.name = "sh";
    command.argv = {"/bin/sh", "-c", script};
    return command;
}

/// What a child with this environment sees: "<OMP_WAIT_POLICY> <GOMP_SPINCOUNT> <COLOUR>".
std::string seen_by_child(std::vector<std::pair<std::string, std::string>> env) {
    auto starter = make_local_starter();
    REQUIRE(starter.has_value());
    Command command = shell("printf %s \"${OMP_WAIT_POLICY--} ${GOMP_SPINCOUNT--} ${COLOUR--}\"");
    command.env = std::move(env);
    auto process = (*starter)->start(command);
    REQUIRE(process.has_value());
    std::string seen = output_until(*process, "");
    REQUIRE(is_readable(process->exited));
    CHECK((*starter)->reap(*process).has_value());
    return seen;
}

/// A shell that says which signals it hears, until SIGTERM.
class Listener {
  public:
    Listener() {
        auto starter = make_local_starter();
        REQUIRE(starter.has_value());
        starter_ = *std::move(starter);
        auto process =
            starter_->start(shell("trap 'echo continued' CONT; trap 'echo ended; exit 0' TERM; "
                                  "sleep 1000 & echo up; while :; do wait; done"));
        REQUIRE(process.has_value());
        process_ = *std::move(process);
        said_ = output_until(process_, "up\n");
    }
    Listener(const Listener&) = delete;
    Listener& operator=(const Listener&) = delete;
    ~Listener() {
        starter_->signal(process_, SIGKILL);
        if (is_readable(process_.exited)) starter_->reap(process_);
    }

    void stop() {
        starter_->signal(process_, SIGSTOP);
        siginfo_t info = {};
        auto id = static_cast<id_t>(process_.pid);
        REQUIRE(::waitid(P_PID, id, &info, WSTOPPED | WNOWAIT) == 0);
    }
    void resume() { starter_->resume(process_); }
    /// Only the shell: of a killed `sleep` it would tell us.
    void end() const { ::kill(process_.pid, SIGTERM); }
    /// All that it has said, once `word` is among it.
    const std::string& hear(const std::string& word) {
        said_ += output_until(process_, word);
        return said_;
    }

  private:
    std::unique_ptr<ProcessStarter> starter_;
    Process process_;
    std::string said_;
};

}  // namespace

TEST_CASE("idle compute threads of a child sleep unless somebody has chosen otherwise") {
    Variable policy("OMP_WAIT_POLICY", std::nullopt);
    Variable spins("GOMP_SPINCOUNT", std::nullopt);
    Variable colour("COLOUR", "red");
    CHECK(seen_by_child({}) == "passive 3000 red");
    CHECK(seen_by_child({{"COLOUR", "blue"}}) == "passive 3000 blue");
    CHECK(seen_by_child({{"OMP_WAIT_POLICY", "active"}}) == "active - red");
    CHECK(seen_by_child({{"GOMP_SPINCOUNT", "7"}}) == "- 7 red");
    SUBCASE("by the policy in our environment") {
        Variable ours("OMP_WAIT_POLICY", "active");
        CHECK(seen_by_child({}) == "active - red");
        CHECK(seen_by_child({{"OMP_WAIT_POLICY", "passive"}}) == "passive - red");
    }
    SUBCASE("by the number of spins in our environment") {
        Variable ours("GOMP_SPINCOUNT", "9");
        CHECK(seen_by_child({}) == "- 9 red");
    }
}

TEST_CASE("a stopped process is continued") {
    Listener listener;
    listener.stop();
    listener.resume();
    CHECK(listener.hear("continued\n") == "up\ncontinued\n");
    listener.end();
    CHECK(listener.hear("ended\n") == "up\ncontinued\nended\n");
}

TEST_CASE("a running process does not hear that stopped ones are continued") {
    Listener listener;
    listener.resume();
    listener.end();
    CHECK(listener.hear("ended\n") == "up\nended\n");
}
