#include "launcher/supervised_stage.h"

#include <fmt/format.h>
#include <unistd.h>

#include <array>
#include <fstream>

namespace k3::launcher {

namespace {

constexpr std::size_t kMaxHeldBack = 50;

}  // namespace

std::string_view to_string(StageState state) noexcept {
    switch (state) {
        case StageState::waiting:
            return "waiting";
        case StageState::starting:
            return "starting";
        case StageState::loading:
            return "loading";
        case StageState::ready:
            return "ready";
        case StageState::lost:
            return "lost";
        case StageState::backing_off:
            return "backing off";
        case StageState::stopping:
            return "stopping";
        case StageState::stopped:
            return "stopped";
        case StageState::failed:
            return "failed";
    }
    return "unknown";
}

bool SupervisedStage::apply(StageEvent event) noexcept {
    auto next = next_state(state, event);
    if (next.has_value()) state = *next;
    return next.has_value();
}

StageRecord SupervisedStage::record() const {
    StageRecord record;
    record.kind = std::string(msg::to_string(plan.kind));
    record.name = plan.name;
    record.endpoint = plan.endpoint;
    record.host = plan.host;
    record.client = plan.client;
    const bool waits = state == StageState::ready && !waiting_for.empty();
    record.state = std::string(waits ? to_string(StageState::waiting) : to_string(state));
    record.detail = state == StageState::loading ? detail : waits ? waiting_for : "";
    record.owned = plan.owned;
    record.pid = has_process() ? process.pid : 0;
    record.restarts = n_restarts;
    return record;
}

void SupervisedStage::begin_process(Process started, Clock::time_point now) {
    process = std::move(started);
    was_ready = false;
    permille = 0;
    detail.clear();
    waiting_for.clear();
    launched_at = now;
    progress_at = now;
    answered_at = now;
    reader_ = OutputReader();
    last_error_.clear();
    held_back_.clear();
}

void SupervisedStage::read_output(const EventLog& events, bool forward_errors) {
    std::array<char, 16384> buffer;
    for (;;) {
        ssize_t got = ::read(process.output.get(), buffer.data(), buffer.size());
        if (got == 0) process.output.reset();
        if (got <= 0) return;
        for (const OutputLine& line :
             reader_.add(std::string_view(buffer.data(), static_cast<std::size_t>(got))))
            handle(line, events, forward_errors);
    }
}

void SupervisedStage::finish_output(const EventLog& events, bool forward_errors, bool crashed) {
    if (process.output.valid()) read_output(events, forward_errors);
    for (const OutputLine& line : reader_.finish()) handle(line, events, forward_errors);
    if (crashed)
        for (const std::string& text : held_back_) events.forward(plan.name, text);
    process.output.reset();
}

void SupervisedStage::handle(const OutputLine& line, const EventLog& events, bool forward_errors) {
    if (line.text.empty()) return;
    bool show = events.detail() == EventLog::Detail::verbose;
    switch (line.level) {
        case LineLevel::debug:
        case LineLevel::info:
            break;
        case LineLevel::warning:
            show = true;
            break;
        case LineLevel::error:
            // Before it is ready the error ends the process and becomes the failure sentence.
            last_error_ = line.message;
            show = show || (state == StageState::ready && forward_errors);
            break;
        case LineLevel::other:
            show = show || plan.wrapped || was_ready;
            if (!show) {
                held_back_.push_back(line.text);
                if (held_back_.size() > kMaxHeldBack) held_back_.pop_front();
            }
            break;
    }
    if (show) events.forward(plan.name, line.text);
}

std::string SupervisedStage::last_words() const {
    if (!last_error_.empty() || held_back_.empty()) return last_error_;
    return held_back_.back();
}

std::string SupervisedStage::reason(const Ending& ending) const {
    const std::string last = last_words();
    if (last.empty()) return "ended with " + ending.text();
    if (ending.signalled) return fmt::format("ended with {}: {}", ending.text(), last);
    return last;
}

std::size_t SupervisedStage::recent_restarts(Clock::time_point since) {
    while (!restarts.empty() && restarts.front() < since) restarts.pop_front();
    return restarts.size();
}

bool is_held_by_someone(pid_t pid) {
    std::ifstream file(fmt::format("/proc/{}/status", pid));
    std::string line;
    while (std::getline(file, line)) {
        if (line.starts_with("State:") && line.find_first_of("tT", 6) != std::string::npos &&
            line.find("stop") != std::string::npos)
            return true;
        if (line.starts_with("TracerPid:") && line.find_first_of("123456789") != std::string::npos)
            return true;
    }
    return false;
}

}  // namespace k3::launcher
