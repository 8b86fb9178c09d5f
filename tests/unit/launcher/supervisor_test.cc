// The supervisor with real processes that are small: fake_service lives as its flags say.

#include "launcher/supervisor.h"

#include <doctest/doctest.h>
#include <fmt/format.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/un.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <mutex>
#include <set>
#include <string>
#include <thread>

#include "launcher/session.h"
#include "launcher/stage_states.h"
#include "launcher/starter.h"
#include "launcher/stop_sequence.h"
#include "tests/support/checkpoint_copy.h"

using namespace k3;
using namespace k3::launcher;
namespace fs = std::filesystem;

TEST_CASE("the transition table has one row for each state and event") {
    for (const Transition& a : kTransitions) {
        auto same = [&a](const Transition& b) { return a.from == b.from && a.event == b.event; };
        CHECK(std::count_if(kTransitions.begin(), kTransitions.end(), same) == 1);
    }
    CHECK(next_state(StageState::ready, StageEvent::exited) == StageState::backing_off);
    CHECK_FALSE(next_state(StageState::stopping, StageEvent::answered_ready).has_value());
    CHECK_FALSE(next_state(StageState::backing_off, StageEvent::answered_ready).has_value());
}

TEST_CASE("an exit is judged by its code, its time and its history") {
    ExitFacts facts;
    facts.max_restarts = 3;
    auto judge = [&facts](int code) {
        facts.ending = {false, code};
        return judge_exit(facts);
    };
    facts.was_ready = true;
    CHECK(judge(2) == Verdict::give_up);
    CHECK(judge(3) == Verdict::give_up);
    CHECK(judge(1) == Verdict::restart);
    CHECK(judge(4) == Verdict::restart);
    CHECK(judge(0) == Verdict::restart);
    facts.was_ready = false;
    CHECK(judge(4) == Verdict::give_up);
    CHECK(judge(0) == Verdict::give_up);
    CHECK(judge(127) == Verdict::give_up);
    CHECK(judge(5) == Verdict::restart);
    facts.ending = {true, SIGKILL};
    CHECK(judge_exit(facts) == Verdict::restart);
    facts.recent_restarts = 3;
    CHECK(judge_exit(facts) == Verdict::give_up);
    facts.recent_restarts = 0;
    facts.policy = RestartPolicy::never;
    CHECK(judge_exit(facts) == Verdict::give_up);
    CHECK(back_off_ms(0) == 100);
    CHECK(back_off_ms(3) == 800);
    CHECK(back_off_ms(100) == 5000);
}

namespace {

/// A pipeline of fake services in a directory of its own, with its loop on a thread.
class Bench {
  public:
    Bench() {
        auto made = make_local_starter();
        REQUIRE(made.has_value());
        starter_ = *std::move(made);
        plan_.name = "bench";
        plan_.run_id = new_run_id();
        options.stop_grace_ms = 1500;
    }
    ~Bench() {
        if (supervisor_ == nullptr) return;
        supervisor_->request_stop();
        finish();
    }

    std::string endpoint(const std::string& name) const {
        return "ipc://" + (temp_.path() / (name + ".sock")).string();
    }
    fs::path file(const std::string& name) const { return temp_.path() / name; }
    /// Of this pipeline alone: other pipelines may run beside.
    std::set<std::string> segments() const {
        std::set<std::string> found;
        const std::string prefix = fmt::format("k3-{:x}-", plan_.run_id);
        for (const auto& entry : fs::directory_iterator("/dev/shm"))
            if (std::string name = entry.path().filename().string(); name.starts_with(prefix))
                found.insert(name.substr(prefix.size()));
        return found;
    }

    StagePlan& add(msg::ServiceKind kind, const std::string& name,
                   std::vector<std::string> behaviour = {}) {
        StagePlan stage;
        stage.kind = kind;
        stage.name = name;
        stage.endpoint = endpoint(name);
        stage.argv = {K3_FAKE_SERVICE,
                      "--listen",
                      stage.endpoint,
                      "--name",
                      name,
                      "--run-id",
                      fmt::format("{:x}", plan_.run_id),
                      "--kind",
                      std::string(to_string(kind))};
        stage.argv.insert(stage.argv.end(), behaviour.begin(), behaviour.end());
        plan_.stages.push_back(stage);
        return plan_.stages.back();
    }
    /// A stage with these behaviours, and the gateway that every pipeline ends with.
    StagePlan& add_pair(std::vector<std::string> behaviour = {}) {
        add(msg::ServiceKind::trunk, "trunk", std::move(behaviour));
        add(msg::ServiceKind::gateway, "gateway");
        return plan_.stages.front();
    }

    void start() {
        auto made = Supervisor::create(
            plan_, options, *starter_, nullptr, events_,
            [this](const std::string& state, const std::vector<StageRecord>& stages) {
                std::lock_guard lock(mutex_);
                state_ = state;
                stages_ = stages;
            });
        REQUIRE(made.has_value());
        supervisor_ = *std::move(made);
        thread_ = std::thread([this] { outcome_ = supervisor_->run(); });
    }
    Supervisor& supervisor() { return *supervisor_; }

    /// Waits for the end of the loop.
    Outcome finish() {
        if (thread_.joinable()) thread_.join();
        supervisor_.reset();
        return outcome_;
    }

    StageRecord stage(const std::string& name) {
        std::lock_guard lock(mutex_);
        for (const StageRecord& record : stages_)
            if (record.name == name) return record;
        return {};
    }
    std::string state() {
        std::lock_guard lock(mutex_);
        return state_;
    }
    template <typename Condition>
    bool wait_for(Condition condition, std::int64_t ms = 10000) {
        Deadline deadline = Deadline::after_ms(ms);
        while (!condition()) {
            if (deadline.expired()) return false;
            std::this_thread::sleep_for(std::chrono::milliseconds(5));
        }
        return true;
    }

    SupervisorOptions options;

  private:
    test::TempDir temp_;
    EventLog events_{EventLog::Detail::brief};
    std::unique_ptr<ProcessStarter> starter_;
    PipelinePlan plan_;
    std::unique_ptr<Supervisor> supervisor_;
    std::thread thread_;
    Outcome outcome_;
    std::mutex mutex_;
    std::string state_;
    std::vector<StageRecord> stages_;
};

/// Somebody who accepts connections (the kernel does) and never says a word.
Fd listening_socket(const fs::path& path) {
    Fd fd(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
    sockaddr_un address = {};
    address.sun_family = AF_UNIX;
    std::strncpy(address.sun_path, path.c_str(), sizeof address.sun_path - 1);
    REQUIRE(::bind(fd.get(), reinterpret_cast<sockaddr*>(&address), sizeof address) == 0);
    REQUIRE(::listen(fd.get(), 100) == 0);
    return fd;
}

pid_t child_of(std::int64_t pid) {
    pid_t child = 0;
    std::ifstream(fmt::format("/proc/{0}/task/{0}/children", pid)) >> child;
    REQUIRE(child > 0);
    return child;
}

bool is_gone(std::int64_t pid) { return ::kill(static_cast<pid_t>(pid), 0) != 0; }

}  // namespace

TEST_CASE("a pipeline is ready when every stage says so, and stops when asked") {
    Bench bench;
    bench.add_pair({"--load-ms", "300"});
    bench.start();
    CHECK(bench.supervisor().wait_ready().has_value());
    CHECK(bench.wait_for([&] { return bench.state() == "ready"; }));
    std::int64_t trunk = bench.stage("trunk").pid;
    CHECK(trunk > 0);
    bench.supervisor().request_stop();
    Outcome outcome = bench.finish();
    CHECK(outcome.status.has_value());
    CHECK(is_gone(trunk));
    CHECK_FALSE(fs::exists(bench.file("trunk.sock")));
}

TEST_CASE("a stage that was killed is started again, and the pipeline is complete again") {
    Bench bench;
    bench.add_pair();
    bench.start();
    REQUIRE(bench.supervisor().wait_ready().has_value());
    std::int64_t first = bench.stage("trunk").pid;
    ::kill(static_cast<pid_t>(first), SIGKILL);
    CHECK(bench.wait_for([&] {
        StageRecord trunk = bench.stage("trunk");
        return trunk.restarts == 1 && trunk.state == "ready" && bench.state() == "ready";
    }));
    CHECK(bench.stage("trunk").pid != first);
    CHECK(bench.stage("gateway").restarts == 0);
}

TEST_CASE("the shared memory of a killed stage is removed while the others keep theirs") {
    Bench bench;
    bench.add(msg::ServiceKind::experts, "other", {"--arena"});
    StagePlan& trunk = bench.add(msg::ServiceKind::trunk, "trunk", {"--arena"});
    bool wrapped = false;
    SUBCASE("a stage alone") {}
    SUBCASE("a stage behind a wrapper, whose process is not the one that was started") {
        wrapped = true;
        trunk.wrapped = true;
        trunk.argv.insert(trunk.argv.begin(), {"/bin/sh", "-c", "\"$0\" \"$@\"; exit $?"});
    }
    bench.add(msg::ServiceKind::gateway, "gateway");
    bench.start();
    REQUIRE(bench.supervisor().wait_ready().has_value());
    std::set<std::string> before = bench.segments();
    REQUIRE(before.size() == 2);
    pid_t owner = wrapped ? child_of(bench.stage("trunk").pid) : pid_t(bench.stage("trunk").pid);
    REQUIRE(before.contains(fmt::format("trunk-{}", owner)));
    ::kill(owner, SIGKILL);
    CHECK(bench.wait_for([&] { return bench.stage("trunk").restarts == 1; }));
    CHECK(bench.wait_for([&] { return bench.state() == "ready"; }));
    std::set<std::string> after = bench.segments();
    CHECK(after.size() == 2);
    CHECK_FALSE(after.contains(fmt::format("trunk-{}", owner)));
    CHECK(after.contains(fmt::format("other-{}", bench.stage("other").pid)));
}

TEST_CASE("bad settings and a bad model end the pipeline with the service's own sentence") {
    Bench bench;
    int code = 0;
    std::string expected = "trunk: the shelf is empty; fill it";
    SUBCASE("model") {
        bench.add_pair({"--exit-at-start", "3"});
        code = 3;
    }
    SUBCASE("in use") {
        bench.add_pair({"--exit-at-start", "4"});
        code = 4;
    }
    SUBCASE("settings, said without a log") {
        bench.add_pair({"--complain"});
        code = 2;
        expected = "trunk: fake_service: cannot be started like this";
    }
    bench.start();
    Status ready = bench.supervisor().wait_ready();
    REQUIRE_FALSE(ready.has_value());
    Outcome outcome = bench.finish();
    REQUIRE_FALSE(outcome.status.has_value());
    CHECK(outcome.status.error().sentence() == expected);
    CHECK(exit_code(outcome.status.error().code) == code);
}

TEST_CASE("a stage that fails at first is retried, and one that always fails is given up") {
    Bench bench;
    bench.options.max_restarts = 2;
    std::string failures;
    bool recovers = false;
    SUBCASE("recovers") {
        failures = "2";
        recovers = true;
    }
    SUBCASE("never does") { failures = "100"; }
    bench.add_pair({"--fail-first", failures, "--lives", bench.file("lives").string()});
    bench.start();
    Status ready = bench.supervisor().wait_ready();
    CHECK(ready.has_value() == recovers);
    if (recovers) {
        CHECK(bench.wait_for([&] { return bench.stage("trunk").restarts == 2; }));
        return;
    }
    CHECK(ready.error().message.find("trunk: ended with exit code 1") == 0);
    CHECK(ready.error().message.find("after 2 restarts within 60 s") != std::string::npos);
}

TEST_CASE("a stage that makes no progress is given up, one that does is waited for") {
    Bench bench;
    // Long enough for a busy machine to start a process, shorter than the loading takes.
    bench.options.start_timeout_ms = 2000;
    SUBCASE("progress") {
        bench.add_pair({"--load-ms", "4000"});
        bench.start();
        CHECK(bench.supervisor().wait_ready().has_value());
    }
    SUBCASE("none") {
        // What follows the command are its own parameters, so the flags of a service do not hurt.
        bench.add_pair().argv = {"/bin/sh", "-c", "sleep 60"};
        bench.start();
        Status ready = bench.supervisor().wait_ready();
        REQUIRE_FALSE(ready.has_value());
        CHECK(ready.error().code == ErrorCode::deadline_exceeded);
        CHECK(ready.error().message.find("trunk is not ready and made no progress") == 0);
    }
}

TEST_CASE("a stage that ignores the request to stop is killed") {
    Bench bench;
    bench.options.stop_grace_ms = 300;
    bench.add_pair({"--deaf"});
    bench.start();
    REQUIRE(bench.supervisor().wait_ready().has_value());
    CHECK(bench.wait_for([&] { return bench.state() == "ready"; }));
    std::int64_t trunk = bench.stage("trunk").pid;
    bench.supervisor().request_stop();
    CHECK(bench.finish().status.has_value());
    CHECK(is_gone(trunk));
}

TEST_CASE("stages are stopped in the order of who calls whom") {
    Bench bench;
    std::string file = bench.file("words").string();
    std::string expected = "gateway trunk experts ";
    bench.add(msg::ServiceKind::experts, "experts", {"--last-words", file});
    SUBCASE("all of them hear") {
        bench.add(msg::ServiceKind::trunk, "trunk", {"--last-words", file});
    }
    SUBCASE("one that does not hear delays the next, and does not save it") {
        bench.add(msg::ServiceKind::trunk, "trunk", {"--deaf"});
        expected = "gateway experts ";
    }
    bench.add(msg::ServiceKind::gateway, "gateway", {"--last-words", file});
    bench.options.stop_grace_ms = 3 * StopSequence::kWaveMs;
    bench.start();
    REQUIRE(bench.supervisor().wait_ready().has_value());
    bench.supervisor().request_stop();
    CHECK(bench.finish().status.has_value());
    CHECK(test::read_file(file) == expected);
}

TEST_CASE("a stopped stage is lost, then ready again, and nobody kills it meanwhile") {
    Bench bench;
    bench.options.silence_ms = 900;
    bench.options.hang_ms = 1100;
    bench.add_pair();
    bench.start();
    REQUIRE(bench.supervisor().wait_ready().has_value());
    CHECK(bench.wait_for([&] { return bench.state() == "ready"; }));
    std::int64_t trunk = bench.stage("trunk").pid;
    ::kill(static_cast<pid_t>(trunk), SIGSTOP);
    CHECK(bench.wait_for([&] { return bench.stage("trunk").state == "lost"; }));
    CHECK(bench.state() == "degraded");
    std::this_thread::sleep_for(std::chrono::milliseconds(400));  // longer than hang_ms in all
    ::kill(static_cast<pid_t>(trunk), SIGCONT);
    CHECK(bench.wait_for([&] { return bench.stage("trunk").state == "ready"; }));
    CHECK(bench.stage("trunk").pid == trunk);
}

TEST_CASE("an attached endpoint is watched, not owned") {
    Bench bench;
    StagePlan& trunk = bench.add_pair();
    SUBCASE("nobody is there, which is known without waiting for an answer") {
        trunk.owned = false;
        bench.options.attach_timeout_ms = 3600'000;
        bench.start();
        Status ready = bench.supervisor().wait_ready();
        REQUIRE_FALSE(ready.has_value());
        CHECK(exit_code(ready.error().code) == kExitUnavailable);
        CHECK(ready.error().message == "nothing answers at " + bench.endpoint("trunk") +
                                           ", the endpoint of trunk: there is no such socket file");
    }
    SUBCASE("somebody accepts connections and never answers") {
        trunk.owned = false;
        bench.options.attach_timeout_ms = 300;
        Fd mute = listening_socket(bench.file("trunk.sock"));
        bench.start();
        Status ready = bench.supervisor().wait_ready();
        REQUIRE_FALSE(ready.has_value());
        CHECK(exit_code(ready.error().code) == kExitUnavailable);
        CHECK(ready.error().message == "nothing answers at " + bench.endpoint("trunk") +
                                           ", the endpoint of trunk, within 300 ms");
    }
    SUBCASE("one that comes a moment after the launcher is met") {
        trunk.owned = false;
        bench.start();
        auto starter = make_local_starter();
        REQUIRE(starter.has_value());
        auto process = (*starter)->start({"trunk", trunk.argv, {}, false});
        REQUIRE(process.has_value());
        CHECK(bench.supervisor().wait_ready().has_value());
        (*starter)->signal(*process, SIGTERM);
        CHECK(bench.wait_for([&] { return (*starter)->reap(*process).has_value(); }));
    }
    SUBCASE("it outlives the pipeline") {
        auto starter = make_local_starter();
        REQUIRE(starter.has_value());
        auto process = (*starter)->start({"trunk", trunk.argv, {}, false});
        REQUIRE(process.has_value());
        trunk.owned = false;
        bench.start();
        CHECK(bench.supervisor().wait_ready().has_value());
        bench.supervisor().request_stop();
        CHECK(bench.finish().status.has_value());
        CHECK_FALSE((*starter)->reap(*process).has_value());
        (*starter)->signal(*process, SIGTERM);
        CHECK(bench.wait_for([&] { return (*starter)->reap(*process).has_value(); }));
    }
    SUBCASE("it is something else") {
        auto starter = make_local_starter();
        REQUIRE(starter.has_value());
        std::vector<std::string> argv = trunk.argv;
        argv.back() = "sampler";
        auto process = (*starter)->start({"sampler", argv, {}, false});
        REQUIRE(process.has_value());
        trunk.owned = false;
        bench.start();
        Status ready = bench.supervisor().wait_ready();
        REQUIRE_FALSE(ready.has_value());
        CHECK(ready.error().message.find("answers for [trunk] and is a sampler") !=
              std::string::npos);
        (*starter)->signal(*process, SIGKILL);
        CHECK(bench.wait_for([&] { return (*starter)->reap(*process).has_value(); }));
    }
}

TEST_CASE("two checkpoints in one pipeline are refused, naming both") {
    Bench bench;
    bench.add(msg::ServiceKind::experts, "experts-0", {"--fingerprint", std::string(32, 'a')});
    bench.add(msg::ServiceKind::experts, "experts-1", {"--fingerprint", std::string(32, 'b')});
    bench.add(msg::ServiceKind::gateway, "gateway");
    bench.start();
    Status ready = bench.supervisor().wait_ready();
    REQUIRE_FALSE(ready.has_value());
    CHECK(exit_code(ready.error().code) == kExitModel);
    CHECK(ready.error().message.find("serve different checkpoints") != std::string::npos);
    CHECK(ready.error().message.find("experts-0") != std::string::npos);
    CHECK(ready.error().message.find("experts-1") != std::string::npos);
}

TEST_CASE("a program that cannot be executed is refused with the reason") {
    Bench bench;
    test::write_file(bench.file("not-a-program"), "hello");
    fs::permissions(bench.file("not-a-program"), fs::perms::owner_all);
    bench.add_pair().argv = {bench.file("not-a-program").string()};
    bench.start();
    Status ready = bench.supervisor().wait_ready();
    REQUIRE_FALSE(ready.has_value());
    CHECK(ready.error().message.find("not-a-program: Exec format error") != std::string::npos);
    CHECK(exit_code(ready.error().code) == kExitUsage);
}
