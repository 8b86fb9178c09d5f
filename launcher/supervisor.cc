#include "launcher/supervisor.h"

#include <fmt/format.h>
#include <poll.h>
#include <signal.h>
#include <sys/signalfd.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <optional>
#include <utility>

#include "common/transport/arena.h"
#include "launcher/endpoint_probe.h"
#include "launcher/stop_sequence.h"
#include "launcher/supervised_stage.h"

namespace k3::launcher {

using std::chrono::milliseconds;

namespace {

constexpr std::int64_t kProgressLineMs = 1000;
constexpr std::int64_t kTakenProbeMs = 200;  // an address that does not react is not taken

double seconds_between(Clock::time_point from, Clock::time_point to) {
    return std::chrono::duration<double>(to - from).count();
}

/// The code that makes our exit code the one of the child.
ErrorCode code_of(const Ending& ending) {
    if (ending.signalled) return ErrorCode::internal;
    switch (ending.number) {
        case kExitUsage:
        case 126:
        case 127:
            return ErrorCode::invalid_argument;
        case kExitModel:
            return ErrorCode::incompatible;
        case kExitResources:
            return ErrorCode::resource_exhausted;
        case kExitUnavailable:
            return ErrorCode::unavailable;
        default:
            return ErrorCode::internal;
    }
}

}  // namespace

Verdict judge_exit(const ExitFacts& facts) noexcept {
    if (!facts.ending.signalled) {
        int code = facts.ending.number;
        if (code == kExitUsage || code == kExitModel || code == 126 || code == 127)
            return Verdict::give_up;
        if (!facts.was_ready && (code == kExitOk || code == kExitResources))
            return Verdict::give_up;
    }
    if (facts.policy == RestartPolicy::never) return Verdict::give_up;
    return facts.recent_restarts < facts.max_restarts ? Verdict::restart : Verdict::give_up;
}

std::int64_t back_off_ms(std::size_t recent_restarts) noexcept {
    std::int64_t pause = 100LL << std::min<std::size_t>(recent_restarts, 6);
    return std::min<std::int64_t>(pause, 5000);
}

/// What other threads see.
struct Supervisor::Shared {
    std::mutex mutex;
    std::condition_variable changed;
    bool ready = false;
    bool ending = false;
    std::optional<Error> failure;
    std::atomic<bool> stop_asked = false;
    std::atomic<bool> stopping = false;
};

class Supervisor::Loop {
  public:
    Loop(PipelinePlan plan, SupervisorOptions options, ProcessStarter& starter, Janitor* janitor,
         const EventLog& events, OnChange on_change)
        : plan_(std::move(plan)),
          options_(options),
          starter_(starter),
          janitor_(janitor),
          events_(events),
          on_change_(std::move(on_change)),
          stop_(stages_, starter_, events_, options_.stop_grace_ms) {}

    Status prepare();
    Outcome run();

    Shared shared;
    std::unique_ptr<Mailbox> mailbox;

  private:
    // What moves a stage.
    void launch(SupervisedStage& stage);
    void launch_gateway_if_others_are_ready();
    void sighted(Sighting sighting);
    void became_ready(SupervisedStage& stage, const Sighting& sighting);
    void show_progress(SupervisedStage& stage, const msg::Pong& pong);
    void exited(SupervisedStage& stage, const Ending& ending);
    std::optional<Error> check_announcement(const SupervisedStage& stage,
                                            const msg::Announcement& announcement) const;

    // What moves the pipeline.
    void fail(SupervisedStage& stage, Error error);
    void begin_stop();
    void publish();
    std::string pipeline_state() const;

    // The loop's parts.
    int wait_ms() const;
    void wait();
    void read_signals();
    void check_timers();
    void check_living(SupervisedStage& stage);
    void return_terminal() const;

    PipelinePlan plan_;
    SupervisorOptions options_;
    ProcessStarter& starter_;
    Janitor* janitor_;
    const EventLog& events_;
    OnChange on_change_;
    std::vector<SupervisedStage> stages_;
    Clock::time_point started_ = Clock::now();
    Clock::time_point now_ = Clock::now();
    bool interrupted_ = false;
    bool was_ready_ = false;  // the pipeline, at least once
    bool degraded_ = false;   // it was ready, and now a stage is not
    bool dirty_ = true;       // something to publish
    StopSequence stop_;
    std::optional<Error> failure_;
};

Status Supervisor::Loop::prepare() {
    ASSIGN_OR_RETURN(mailbox, Mailbox::create());
    for (StagePlan& stage : plan_.stages) stages_.emplace_back(std::move(stage));
    for (std::size_t i = 0; i < stages_.size(); ++i) {
        Watcher::Options watch;
        watch.stage = i;
        watch.name = stages_[i].plan.name;
        watch.endpoint = stages_[i].plan.endpoint;
        watch.run_id = plan_.run_id;
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

void Supervisor::Loop::launch(SupervisedStage& stage) {
    dirty_ = true;
    if (!stage.plan.owned) {
        stage.begin_process(Process(), now_);
        stage.apply(StageEvent::launched);
        events_.normal(fmt::format("{} is attached at {}: not started, not stopped, only watched",
                                   stage.plan.name, stage.plan.endpoint));
        return;
    }
    // Else a stage that finds its place taken would look ready for a moment, because the owner of
    // the place answers in its name.
    if (probe_endpoint(stage.plan.endpoint, kTakenProbeMs).finding ==
        EndpointProbe::Finding::listening) {
        fail(stage, Error{ErrorCode::resource_exhausted,
                          fmt::format("{}, the endpoint of {}, is taken by another process",
                                      stage.plan.endpoint, stage.plan.name),
                          "stop that process, or give the stage another endpoint (listen)"});
        return;
    }
    // Again, for the members of a wrapper's group that were still dying at the last time.
    if (stage.n_restarts > 0) transport::sweep_dead_segments(plan_.run_id);
    auto process =
        starter_.start({stage.plan.name, stage.plan.argv, stage.plan.env, stage.plan.terminal});
    if (!process.has_value()) {
        fail(stage, std::move(process).error());
        return;
    }
    if (janitor_ != nullptr) janitor_->watch(process->pid);
    stage.begin_process(*std::move(process), now_);
    stage.apply(StageEvent::launched);
    stage.watcher->hurry();
    events_.normal(
        fmt::format("{} started (pid {}{})", stage.plan.name, stage.process.pid,
                    stage.plan.wrapped ? ", wrapped in " + stage.plan.argv.front() : ""));
}

void Supervisor::Loop::launch_gateway_if_others_are_ready() {
    SupervisedStage& gateway = stages_.back();
    if (stop_.begun() || gateway.state != StageState::waiting) return;
    bool ready = std::all_of(stages_.begin(), stages_.end() - 1, [](const SupervisedStage& stage) {
        return stage.state == StageState::ready;
    });
    if (ready) launch(gateway);
}

void Supervisor::Loop::sighted(Sighting sighting) {
    SupervisedStage& stage = stages_[sighting.stage];
    if (stop_.begun()) return;
    if (sighting.refusal.has_value()) {
        if (stage.state != StageState::waiting && stage.state != StageState::backing_off)
            fail(stage, *std::move(sighting.refusal));
        return;
    }
    if (!sighting.answered || sighting.pong.instance == stage.dead_instance) return;
    // A stage of ours that has no process cannot be what answers: it is a taken endpoint, and the
    // process that is about to start will say so.
    if (stage.plan.owned && !stage.has_process()) return;
    stage.answered_at = now_;
    stage.instance = sighting.pong.instance;
    switch (sighting.pong.state) {
        case msg::State::loading:
            if (stage.apply(StageEvent::answered_loading)) show_progress(stage, sighting.pong);
            break;
        case msg::State::ready:
            became_ready(stage, sighting);
            break;
        case msg::State::failed:
            // One of ours ends now and its exit code says more.
            if (!stage.plan.owned)
                fail(stage, Error{ErrorCode::unavailable,
                                  fmt::format("{} (attached at {}) failed: {}", stage.plan.name,
                                              stage.plan.endpoint, sighting.pong.detail),
                                  "restart that process"});
            break;
        case msg::State::stopping:
            break;
    }
}

void Supervisor::Loop::became_ready(SupervisedStage& stage, const Sighting& sighting) {
    if (sighting.announcement.has_value()) {
        if (auto error = check_announcement(stage, *sighting.announcement)) {
            fail(stage, *std::move(error));
            return;
        }
        stage.fingerprint = sighting.announcement->fingerprint;
    }
    StageState before = stage.state;
    if (!stage.apply(StageEvent::answered_ready) || before == StageState::ready) return;
    stage.was_ready = true;
    dirty_ = true;
    std::string line = fmt::format("{} is ready after {:.2f} s", stage.plan.name,
                                   seconds_between(stage.launched_at, now_));
    if (before == StageState::lost) line = fmt::format("{} answers again", stage.plan.name);
    if (stage.n_restarts > 0 || before == StageState::lost)
        events_.important(line);
    else
        events_.normal(line);
}

std::optional<Error> Supervisor::Loop::check_announcement(
    const SupervisedStage& stage, const msg::Announcement& announcement) const {
    if (announcement.kind != stage.plan.kind)
        return Error{ErrorCode::incompatible,
                     fmt::format("{} answers for [{}] and is a {} (called {})", stage.plan.endpoint,
                                 msg::to_string(stage.plan.kind), msg::to_string(announcement.kind),
                                 announcement.name),
                     "correct the endpoint or binary in the pipeline file"};
    for (const SupervisedStage& other : stages_) {
        if (&other == &stage || other.fingerprint.empty() || announcement.fingerprint.empty() ||
            other.fingerprint == announcement.fingerprint)
            continue;
        return Error{ErrorCode::incompatible,
                     fmt::format("{} and {} serve different checkpoints (fingerprints {} and {})",
                                 stage.plan.name, other.plan.name, announcement.fingerprint,
                                 other.fingerprint),
                     "give every stage the same model"};
    }
    return std::nullopt;
}

void Supervisor::Loop::show_progress(SupervisedStage& stage, const msg::Pong& pong) {
    if (pong.progress_permille == stage.permille && pong.detail == stage.detail) return;
    stage.permille = pong.progress_permille;
    stage.detail = pong.detail;
    stage.progress_at = now_;
    dirty_ = true;
    if (now_ - started_ < milliseconds(kProgressLineMs) ||
        now_ - stage.shown_at < milliseconds(kProgressLineMs))
        return;
    stage.shown_at = now_;
    events_.important(fmt::format("{} loads: {}.{} % ({})", stage.plan.name, stage.permille / 10,
                                  stage.permille % 10, stage.detail));
}

void Supervisor::Loop::exited(SupervisedStage& stage, const Ending& ending) {
    dirty_ = true;
    stage.finish_output(events_, options_.forward_errors && !stop_.begun(),
                        ending.signalled && !stop_.begun());
    stage.dead_instance = stage.instance;
    transport::sweep_dead_segments(plan_.run_id);  // one that was killed could not remove its own
    stage.fingerprint.clear();
    if (stage.plan.terminal) return_terminal();
    if (stop_.begun()) {
        stage.apply(StageEvent::exited);
        return;
    }
    ExitFacts facts;
    facts.ending = ending;
    facts.was_ready = stage.was_ready;
    facts.recent_restarts = stage.recent_restarts(now_ - milliseconds(options_.restart_window_ms));
    facts.max_restarts = options_.max_restarts;
    facts.policy = stage.plan.restart;
    std::string reason = stage.reason(ending);
    if (judge_exit(facts) == Verdict::give_up) {
        if (facts.recent_restarts > 0 && facts.policy != RestartPolicy::never)
            reason += fmt::format(" (after {} restarts within {} s)", facts.recent_restarts,
                                  options_.restart_window_ms / 1000);
        fail(stage, Error{code_of(ending), fmt::format("{}: {}", stage.plan.name, reason), ""});
        return;
    }
    std::int64_t pause = back_off_ms(facts.recent_restarts);
    stage.apply(StageEvent::exited);
    stage.next_start = now_ + milliseconds(pause);
    events_.important(fmt::format("{} ended with {}; restart {} of {} in {} ms", stage.plan.name,
                                  ending.text(), facts.recent_restarts + 1, facts.max_restarts,
                                  pause));
}

void Supervisor::Loop::fail(SupervisedStage& stage, Error error) {
    stage.apply(StageEvent::refused);
    if (!failure_.has_value()) failure_ = std::move(error);
    if (!stop_.begun()) begin_stop();
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
        return stage.state == StageState::ready;
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

void Supervisor::Loop::check_living(SupervisedStage& stage) {
    bool coming = stage.state == StageState::starting || stage.state == StageState::loading;
    if (stage.state == StageState::starting && !stage.plan.owned &&
        now_ - stage.progress_at > milliseconds(options_.attach_timeout_ms)) {
        fail(stage,
             Error{ErrorCode::unavailable,
                   fmt::format("nothing answers at {}, the endpoint of {}, within {} ms",
                               stage.plan.endpoint, stage.plan.name, options_.attach_timeout_ms),
                   "start that process first, or remove the endpoint from the pipeline file"});
    } else if (coming && !stage.plan.terminal &&
               now_ - stage.progress_at > milliseconds(options_.start_timeout_ms)) {
        fail(stage,
             Error{ErrorCode::deadline_exceeded,
                   fmt::format("{} is not ready and made no progress for {} s ({} at {}.{} %"
                               "{}{})",
                               stage.plan.name, options_.start_timeout_ms / 1000,
                               to_string(stage.state), stage.permille / 10, stage.permille % 10,
                               stage.detail.empty() ? "" : ": ", stage.detail),
                   "raise start_timeout_s in [pipeline], or look at its log with -v"});
    } else if (stage.state == StageState::ready &&
               now_ - stage.answered_at > milliseconds(options_.silence_ms)) {
        stage.apply(StageEvent::silent);
        dirty_ = true;
        events_.important(
            fmt::format("{} ({}) does not answer since {:.0f} s", stage.plan.name,
                        stage.plan.owned ? fmt::format("pid {}", stage.process.pid) : "attached",
                        seconds_between(stage.answered_at, now_)));
    } else if (stage.state == StageState::lost && stage.has_process() && !stage.plan.wrapped &&
               now_ - stage.answered_at > milliseconds(options_.hang_ms) &&
               !is_held_by_someone(stage.process.pid)) {
        events_.important(fmt::format("{} (pid {}) hangs since {:.0f} s and is killed",
                                      stage.plan.name, stage.process.pid,
                                      seconds_between(stage.answered_at, now_)));
        starter_.signal(stage.process, SIGKILL);
        stage.answered_at = now_;  // once is enough
    }
}

void Supervisor::Loop::return_terminal() const {
    if (::isatty(STDIN_FILENO) != 0) ::tcsetpgrp(STDIN_FILENO, ::getpgrp());
}

Supervisor::Supervisor(std::unique_ptr<Loop> loop) : loop_(std::move(loop)) {}
Supervisor::~Supervisor() = default;

Result<std::unique_ptr<Supervisor>> Supervisor::create(PipelinePlan plan, SupervisorOptions options,
                                                       ProcessStarter& starter, Janitor* janitor,
                                                       const EventLog& events, OnChange on_change) {
    auto loop = std::make_unique<Loop>(std::move(plan), options, starter, janitor, events,
                                       std::move(on_change));
    RETURN_IF_ERROR(loop->prepare());
    return std::unique_ptr<Supervisor>(new Supervisor(std::move(loop)));
}

Outcome Supervisor::run() { return loop_->run(); }

Status Supervisor::wait_ready() {
    Shared& shared = loop_->shared;
    std::unique_lock lock(shared.mutex);
    shared.changed.wait(lock, [&] { return shared.ready || shared.ending; });
    if (shared.failure.has_value()) return *shared.failure;
    if (!shared.ready)
        return Error{ErrorCode::cancelled, "the pipeline was stopped before it was ready", ""};
    return Status::ok();
}

void Supervisor::request_stop() noexcept {
    loop_->shared.stop_asked = true;
    loop_->mailbox->ring();
}

bool Supervisor::stopping() const noexcept { return loop_->shared.stopping; }

}  // namespace k3::launcher
