#include "tests/unit/launcher/supervisor_bench.h"

#include <doctest/doctest.h>
#include <fmt/format.h>

#include <utility>

#include "launcher/session.h"

namespace k3::test {

namespace fs = std::filesystem;
using namespace launcher;

SupervisorBench::SupervisorBench() {
    auto made = make_local_starter();
    REQUIRE(made.has_value());
    starter_ = *std::move(made);
    plan_.name = "bench";
    plan_.run_id = new_run_id();
    options.stop_grace_ms = 1500;
}

SupervisorBench::~SupervisorBench() {
    if (supervisor_ == nullptr) return;
    supervisor_->request_stop();
    finish();
}

std::string SupervisorBench::endpoint(const std::string& name) const {
    return fmt::format("ipc://{}", file(fmt::format("{}.sock", name)).string());
}

std::set<std::string> SupervisorBench::segments() const {
    std::set<std::string> found;
    const std::string prefix = fmt::format("k3-{:x}-", plan_.run_id);
    for (const auto& entry : fs::directory_iterator("/dev/shm"))
        if (std::string name = entry.path().filename().string(); name.starts_with(prefix))
            found.insert(name.substr(prefix.size()));
    return found;
}

StagePlan& SupervisorBench::add(msg::ServiceKind kind, const std::string& name,
                                const std::vector<std::string>& behaviour) {
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
    plan_.stages.push_back(std::move(stage));
    return plan_.stages.back();
}

StagePlan& SupervisorBench::add_pair(const std::vector<std::string>& behaviour) {
    add(msg::ServiceKind::trunk, "trunk", behaviour);
    add(msg::ServiceKind::gateway, "gateway");
    return plan_.stages.front();
}

void SupervisorBench::start() {
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

Outcome SupervisorBench::finish() {
    if (thread_.joinable()) thread_.join();
    supervisor_.reset();
    return outcome_;
}

StageRecord SupervisorBench::stage(const std::string& name) {
    std::lock_guard lock(mutex_);
    for (const StageRecord& record : stages_)
        if (record.name == name) return record;
    return {};
}

std::string SupervisorBench::state() {
    std::lock_guard lock(mutex_);
    return state_;
}

}  // namespace k3::test
