#include "launcher/supervisor_loop.h"

#include <fmt/format.h>
#include <poll.h>
#include <sys/signalfd.h>
#include <unistd.h>

#include <algorithm>
#include <utility>

namespace k3::launcher {

Status Supervisor::Loop::prepare() {
    ASSIGN_OR_RETURN(mailbox, Mailbox::create());
    for (StagePlan& stage : plan_.stages) stages_.emplace_back(std::move(stage));
    for (std::size_t i = 0; i < stages_.size(); ++i) {
        Watcher::Options watch;
        watch.stage = i;
        watch.name = stages_[i].plan.name;
        watch.endpoint = stages_[i].plan.endpoint;
        watch.run_id = plan_.run_id;
        watch.keys = options_.keys;
        watch.attached = !stages_[i].plan.owned;
        ASSIGN_OR_RETURN(stages_[i].watcher, Watcher::start(std::move(watch), *mailbox));
    }
    return Status::ok();
}

Outcome Supervisor::Loop::run() {
    started_ = now_ = Clock::now();
    for (SupervisedStage& stage : stages_)
        if (!stop_.begun() && (!stage.plan.owned || stage.plan.kind != msg::ServiceKind::gateway))
            launch(stage);
    while (!stop_.finished(now_)) {
        launch_gateway_if_others_are_ready();
        if (dirty_) publish();
        wait();
        now_ = Clock::now();
        if (shared.stop_asked && !stop_.begun()) begin_stop();
        mailbox->silence();
        while (auto sighting = mailbox->take()) sighted(*std::move(sighting));
        for (SupervisedStage& stage : stages_) {
            if (stage.process.output.valid()) stage.read_output(events_, options_.forward_errors);
            if (!stage.has_process()) continue;
            pid_t group = stage.process.pid;
            auto ending = starter_.reap(stage.process);
            if (!ending.has_value()) continue;
            if (janitor_ != nullptr) janitor_->forget(group);
            exited(stage, *ending);
        }
        check_timers();
    }
    for (SupervisedStage& stage : stages_) stage.watcher->ask_stop();
    for (SupervisedStage& stage : stages_) stage.watcher.reset();
    if (failure_.has_value()) return {Status(*failure_), interrupted_};
    return {Status::ok(), interrupted_};
}

int Supervisor::Loop::wait_ms() const {
    // Timers are coarse: 50 ms while anything is in motion, else a quarter of a second.
    bool quiet = !stop_.begun() &&
                 std::all_of(stages_.begin(), stages_.end(),
                             [](const auto& stage) { return stage.state == StageState::ready; });
    return quiet ? 250 : 50;
}

void Supervisor::Loop::wait() {
    std::vector<pollfd> fds;
    fds.push_back({mailbox->fd(), POLLIN, 0});
    if (options_.signal_fd >= 0) fds.push_back({options_.signal_fd, POLLIN, 0});
    for (const SupervisedStage& stage : stages_) {
        if (stage.process.exited.valid()) fds.push_back({stage.process.exited.get(), POLLIN, 0});
        if (stage.process.output.valid()) fds.push_back({stage.process.output.get(), POLLIN, 0});
    }
    ::poll(fds.data(), fds.size(), wait_ms());
    if (options_.signal_fd >= 0 && (fds[1].revents & POLLIN) != 0) read_signals();
}

void Supervisor::Loop::read_signals() {
    signalfd_siginfo info = {};
    while (::read(options_.signal_fd, &info, sizeof info) == static_cast<ssize_t>(sizeof info)) {
        interrupted_ = true;
        now_ = Clock::now();
        if (!stop_.begun())
            begin_stop();
        else
            stop_.hurry(now_);
    }
}

void Supervisor::Loop::check_timers() {
    if (stop_.begun()) {
        stop_.advance(now_);
        return;
    }
    for (SupervisedStage& stage : stages_) {
        if (stop_.begun()) return;
        if (stage.state == StageState::backing_off && now_ >= stage.next_start) {
            stage.restarts.push_back(now_);
            ++stage.n_restarts;
            launch(stage);
        } else {
            check_living(stage);
        }
    }
}

void Supervisor::Loop::begin_stop() {
    dirty_ = true;
    {
        std::lock_guard lock(shared.mutex);
        shared.ending = true;
        shared.failure = failure_;
        shared.stopping = true;
    }
    shared.changed.notify_all();
    if (was_ready_ || !failure_.has_value()) events_.normal("stopping");
    stop_.begin(now_);
}

std::string Supervisor::Loop::pipeline_state() const {
    if (stop_.begun()) return "stopping";
    bool ready = std::all_of(stages_.begin(), stages_.end(), [](const SupervisedStage& stage) {
        return stage.state == StageState::ready && stage.waiting_for.empty();
    });
    if (ready) return "ready";
    return was_ready_ ? "degraded" : "starting";
}

void Supervisor::Loop::publish() {
    dirty_ = false;
    std::string state = pipeline_state();
    std::vector<StageRecord> records;
    for (const SupervisedStage& stage : stages_) records.push_back(stage.record());
    if (on_change_) on_change_(state, records);
    if (state == "degraded") degraded_ = true;
    if (state != "ready" || (was_ready_ && !degraded_)) return;
    if (!was_ready_)
        events_.important(fmt::format("pipeline '{}' is ready after {:.2f} s", plan_.name,
                                      seconds_between(started_, now_)));
    else
        events_.important(fmt::format("pipeline '{}' is complete again", plan_.name));
    was_ready_ = true;
    degraded_ = false;
    std::lock_guard lock(shared.mutex);
    shared.ready = true;
    shared.changed.notify_all();
}

}  // namespace k3::launcher
