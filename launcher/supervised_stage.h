#pragma once
// One stage in the supervisor's hands: its plan, its state, its process, what it said last.

#include <cstdint>
#include <deque>
#include <memory>
#include <string>
#include <string_view>

#include "common/base/deadline.h"
#include "launcher/events.h"
#include "launcher/run_directory.h"
#include "launcher/service_output.h"
#include "launcher/stage_plan.h"
#include "launcher/stage_states.h"
#include "launcher/starter.h"
#include "launcher/watcher.h"

namespace k3::launcher {

class SupervisedStage {
  public:
    explicit SupervisedStage(StagePlan stage_plan) : plan(std::move(stage_plan)) {}

    /// Moves along the table; false if the event means nothing now.
    bool apply(StageEvent event) noexcept;
    bool has_process() const noexcept { return process.pid > 0; }
    StageRecord record() const;

    /// Reads what the process printed: remembers the last error, forwards what people should see.
    void read_output(const EventLog& events, bool forward_errors);
    /// The rest of it, after the process has ended. `crashed`: lines held back are shown.
    void finish_output(const EventLog& events, bool forward_errors, bool crashed);

    /// Its last error, or else its last line of any kind; empty if it printed nothing.
    std::string last_words() const;
    /// Its last words, or how it ended: for the failure sentence.
    std::string reason(const Ending& ending) const;

    /// Restarts at or after `since`; older ones are forgotten.
    std::size_t recent_restarts(Clock::time_point since);

    /// Forgets what belonged to the process that ended.
    void begin_process(Process started, Clock::time_point now);

    StagePlan plan;
    StageState state = StageState::waiting;
    Process process;
    std::unique_ptr<Watcher> watcher;
    bool was_ready = false;           // the present process, or attached peer, has been ready
    std::uint64_t instance = 0;       // as last answered
    std::uint64_t dead_instance = 0;  // late answers of it are ignored
    std::string fingerprint;          // of its checkpoint, once ready
    std::uint32_t permille = 0;       // of loading
    std::string detail;               // what is being loaded
    std::string waiting_for;          // services without which it cannot compute, though ready
    Clock::time_point launched_at;
    Clock::time_point ended_at;     // of the process before the present one
    Clock::time_point progress_at;  // start, or the last progress
    Clock::time_point answered_at;
    Clock::time_point shown_at;    // last progress line
    Clock::time_point next_start;  // in backing_off
    std::deque<Clock::time_point> restarts;
    std::uint32_t n_restarts = 0;

  private:
    void handle(const OutputLine& line, const EventLog& events, bool forward_errors);
    OutputReader reader_;
    std::string last_error_;             // message of the last error line
    std::deque<std::string> held_back_;  // lines of no log format, before it was ready
};

/// True while a debugger traces the process or someone stopped it: its silence is meant.
bool is_held_by_someone(pid_t pid);

}  // namespace k3::launcher
