#include "launcher/stop_sequence.h"

#include <fmt/format.h>
#include <signal.h>

#include <algorithm>

namespace k3::launcher {

using std::chrono::milliseconds;

namespace {

constexpr std::int64_t kKillPatienceMs = 1500;  // for the kernel to end what got SIGKILL
constexpr std::int64_t kSecondAskMs = 200;      // a terminal may deliver one Ctrl-C twice
constexpr int kLastWave = 2;

int wave_of(msg::ServiceKind kind) {
    if (kind == msg::ServiceKind::gateway) return 0;
    return kind == msg::ServiceKind::trunk ? 1 : kLastWave;
}

}  // namespace

void StopSequence::begin(Clock::time_point now) {
    begun_ = true;
    begun_at_ = now;
    for (SupervisedStage& stage : stages_) {
        stage.apply(StageEvent::stop_asked);
        if (!stage.plan.owned && stage.state == StageState::stopping)
            stage.apply(StageEvent::exited);
    }
    ask_wave(now);
}

void StopSequence::hurry(Clock::time_point now) {
    if (now - begun_at_ > milliseconds(kSecondAskMs)) begun_at_ = now - milliseconds(grace_ms_);
}

void StopSequence::advance(Clock::time_point now) {
    while (wave_ < kLastWave &&
           (!any_process_up_to(wave_) || now - wave_at_ > milliseconds(kWaveMs))) {
        ++wave_;
        ask_wave(now);
    }
    if (!killed_ && now - begun_at_ >= milliseconds(grace_ms_)) kill_all();
}

bool StopSequence::finished(Clock::time_point now) const {
    if (!begun_) return false;
    if (killed_ && now - begun_at_ > milliseconds(grace_ms_ + kKillPatienceMs)) return true;
    return !any_process_up_to(kLastWave);
}

void StopSequence::ask_wave(Clock::time_point now) {
    wave_at_ = now;
    for (SupervisedStage& stage : stages_) {
        if (!stage.has_process() || wave_of(stage.plan.kind) != wave_) continue;
        starter_.signal(stage.process, SIGTERM);
        starter_.resume(stage.process);  // a stopped process cannot hear it
    }
}

bool StopSequence::any_process_up_to(int wave) const {
    return std::any_of(stages_.begin(), stages_.end(), [wave](const SupervisedStage& stage) {
        return stage.has_process() && wave_of(stage.plan.kind) <= wave;
    });
}

void StopSequence::kill_all() {
    killed_ = true;
    for (SupervisedStage& stage : stages_) {
        if (!stage.has_process()) continue;
        events_.important(fmt::format("{} (pid {}) did not stop within {} ms and is killed",
                                      stage.plan.name, stage.process.pid, grace_ms_));
        starter_.signal(stage.process, SIGKILL);
    }
}

}  // namespace k3::launcher
