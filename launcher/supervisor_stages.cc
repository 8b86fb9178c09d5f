// How the supervisor's loop treats one stage: its start, its answers, its silence and its end.

#include <fmt/format.h>
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <utility>

#include "common/transport/arena.h"
#include "launcher/endpoint_probe.h"
#include "launcher/exit_verdict.h"
#include "launcher/stage_checks.h"
#include "launcher/supervisor_loop.h"

namespace k3::launcher {

using std::chrono::milliseconds;

namespace {

constexpr std::int64_t kProgressLineMs = 1000;
constexpr std::int64_t kTakenProbeMs = 200;  // an address that does not react is not taken
constexpr std::int64_t kCedeMs = 12000;      // for a stage of another box to notice its end
constexpr std::int64_t kCedePollMs = 500;

}  // namespace

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
        // The far end of a broken connection notices it by itself, and needs its time.
        if (!stage.plan.host.empty() && stage.n_restarts > 0 &&
            now_ - stage.ended_at < milliseconds(kCedeMs)) {
            stage.next_start = now_ + milliseconds(kCedePollMs);
            stage.restarts.pop_back();  // this was none
            --stage.n_restarts;
            return;
        }
        fail(stage, Error{ErrorCode::resource_exhausted,
                          fmt::format("{}, the endpoint of {}, is taken by another process",
                                      stage.plan.endpoint, stage.plan.name),
                          "stop that process, or give the stage another endpoint (listen)"});
        return;
    }
    // Again, for the members of a wrapper's group that were still dying at the last time.
    if (stage.n_restarts > 0) transport::sweep_dead_segments(plan_.run_id);
    auto process = starter_.start({.name = stage.plan.name,
                                   .argv = stage.plan.argv,
                                   .env = stage.plan.env,
                                   .terminal = stage.plan.terminal,
                                   .host = stage.plan.host,
                                   .n_wrap = stage.plan.n_wrap,
                                   .own_sessions = stage.plan.own_sessions,
                                   .with_keys = !stage.plan.keys.empty()});
    if (!process.has_value()) {
        fail(stage, std::move(process).error());
        return;
    }
    if (janitor_ != nullptr) janitor_->watch(process->pid);
    stage.begin_process(*std::move(process), now_);
    stage.apply(StageEvent::launched);
    stage.watcher->hurry();
    events_.normal(fmt::format(
        "{} started ({}pid {}{})", stage.plan.name,
        stage.plan.host.empty() ? ""
                                : fmt::format("on {}, {} ", stage.plan.host, stage.plan.client),
        stage.process.pid, stage.plan.wrapped ? ", wrapped in " + stage.plan.argv.front() : ""));
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
            show_waiting(stage, sighting.pong.waiting_for);
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
        if (auto error = check_announcement(stage, *sighting.announcement, stages_)) {
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

void Supervisor::Loop::show_waiting(SupervisedStage& stage, const std::string& waiting_for) {
    if (stage.state != StageState::ready || stage.waiting_for == waiting_for) return;
    stage.waiting_for = waiting_for;
    dirty_ = true;
    events_.important(waiting_for.empty()
                          ? fmt::format("{} has all it needs again", stage.plan.name)
                          : fmt::format("{} waits for {}", stage.plan.name, waiting_for));
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
    stage.ended_at = now_;
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
    // Counted for all of the cgroup: one of ours that was killed at that moment is most likely it.
    const bool was_out_of_memory =
        out_of_memory_.has_grown() && ending.signalled && ending.number == SIGKILL;
    const std::string by_whom = was_out_of_memory ? out_of_memory_.explain() : "";
    reason += by_whom;
    if (auto lost = starter_.lost(stage.plan.host)) {
        fail(stage, *std::move(lost));
        return;
    }
    if (judge_exit(facts) == Verdict::give_up) {
        if (facts.recent_restarts > 0 && facts.policy != RestartPolicy::never)
            reason += fmt::format(" (after {} restarts within {} s)", facts.recent_restarts,
                                  options_.restart_window_ms / 1000);
        // Bad settings stand in the pipeline file, whatever the service calls them.
        const bool settings = ending.exit_code() == kExitUsage && !stage.plan.where.empty();
        std::string where = settings ? fmt::format("{}: ", stage.plan.where) : "";
        // A service that ended by itself and said why has said what to do, too.
        const bool says_why = !ending.signalled && !stage.last_words().empty();
        std::string remedy =
            says_why ? ""
                     : fmt::format("start {} by hand to see why (k3pipe plan prints the command)",
                                   stage.plan.argv.front());
        fail(stage,
             Error{error_code_of(ending), fmt::format("{}{}: {}", where, stage.plan.name, reason),
                   std::move(remedy)});
        return;
    }
    std::int64_t pause = back_off_ms(facts.recent_restarts);
    stage.apply(StageEvent::exited);
    stage.next_start = now_ + milliseconds(pause);
    events_.important(fmt::format("{} ended with {}{}; restart {} of {} in {} ms", stage.plan.name,
                                  ending.text(), by_whom, facts.recent_restarts + 1,
                                  facts.max_restarts, pause));
}

void Supervisor::Loop::fail(SupervisedStage& stage, Error error) {
    stage.apply(StageEvent::refused);
    if (!failure_.has_value()) failure_ = std::move(error);
    if (!stop_.begun()) begin_stop();
}

void Supervisor::Loop::check_living(SupervisedStage& stage) {
    if (auto error = check_start(stage, options_, now_)) {
        fail(stage, *std::move(error));
    } else if (stage.state == StageState::ready &&
               now_ - stage.answered_at > milliseconds(options_.silence_ms)) {
        stage.apply(StageEvent::silent);
        dirty_ = true;
        events_.important(
            fmt::format("{} ({}) has not answered for {:.0f} s", stage.plan.name,
                        stage.plan.owned ? fmt::format("pid {}", stage.process.pid) : "attached",
                        seconds_between(stage.answered_at, now_)));
    } else if (stage.state == StageState::lost && stage.has_process() && !stage.plan.wrapped &&
               now_ - stage.answered_at > milliseconds(options_.hang_ms) &&
               !is_held_by_someone(stage.process.pid)) {
        events_.important(fmt::format("{} (pid {}) has not answered for {:.0f} s and is killed",
                                      stage.plan.name, stage.process.pid,
                                      seconds_between(stage.answered_at, now_)));
        starter_.signal(stage.process, SIGKILL);
        stage.answered_at = now_;  // once is enough
    }
}

void Supervisor::Loop::return_terminal() const {
    if (::isatty(STDIN_FILENO) != 0) ::tcsetpgrp(STDIN_FILENO, ::getpgrp());
}

}  // namespace k3::launcher
