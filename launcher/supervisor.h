#pragma once
// Starts the stages of a pipeline, watches them, restarts what died, stops everything.
//
// One loop waits for everything at once: processes that end (pidfd), what they print (pipes), how
// they answer (the watchers' mailbox), signals, and its own timers. The states of a stage are the
// table in stage_states.h; this file adds what has to be remembered along with them.
//
// Start: every stage at once, but the gateway only when all others are ready, because it is the one
// that a client can reach. Readiness is what a stage says of itself; nothing sleeps and hopes.
//
// Threads: run() is the loop and owns everything; request_stop, wait_ready and stopping may be
// called from any thread.

#include <condition_variable>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "common/base/deadline.h"
#include "common/base/result.h"
#include "launcher/events.h"
#include "launcher/janitor.h"
#include "launcher/run_directory.h"
#include "launcher/stage_plan.h"
#include "launcher/starter.h"

namespace k3::launcher {

/// What to do after a process ended without being asked.
enum class Verdict { restart, give_up };
struct ExitFacts {
    Ending ending;
    bool was_ready = false;           // this process had been ready
    std::size_t recent_restarts = 0;  // of the stage, within the window
    std::size_t max_restarts = 0;
    RestartPolicy policy = RestartPolicy::on_failure;
};
/// Bad settings (2) and a bad model (3) are given up at once, and so is what ends by itself before
/// it was ever ready with an answer that will not change (0, in use 4, not executable 126, 127).
Verdict judge_exit(const ExitFacts& facts) noexcept;
/// Pause before the next start: 100 ms, doubled for each recent restart, at most 5 s.
std::int64_t back_off_ms(std::size_t recent_restarts) noexcept;

struct SupervisorOptions {
    std::int64_t start_timeout_ms = 120000;  // without any progress
    std::int64_t attach_timeout_ms = 2000;   // for an attached endpoint to answer at all
    std::int64_t silence_ms = 3000;          // without an answer: lost
    std::int64_t hang_ms = 30000;            // lost for so long, and nobody holds it: killed
    std::int64_t stop_grace_ms = 2500;       // between SIGTERM and SIGKILL
    std::size_t max_restarts = 5;
    std::int64_t restart_window_ms = 60000;
    bool forward_errors = true;  // error lines of ready services; `run` reports errors itself
    int signal_fd = -1;          // a signalfd with the signals that mean stop
};

/// How it all ended.
struct Outcome {
    Status status;             // an error: the pipeline failed
    bool interrupted = false;  // by a signal
};

class Supervisor {
  public:
    using OnChange = std::function<void(const std::string& state, const std::vector<StageRecord>&)>;

    /// Borrows starter, events and janitor (null: none). `on_change` is called by the loop.
    /// Errors: io; invalid_argument (an endpoint that cannot be one).
    static Result<std::unique_ptr<Supervisor>> create(PipelinePlan plan, SupervisorOptions options,
                                                      ProcessStarter& starter, Janitor* janitor,
                                                      const EventLog& events, OnChange on_change);
    ~Supervisor();
    Supervisor(const Supervisor&) = delete;
    Supervisor& operator=(const Supervisor&) = delete;

    /// Starts everything and returns when everything has stopped.
    Outcome run();

    /// Returns when the pipeline is ready, or with the reason why it never will be
    /// (cancelled: a stop was asked for).
    Status wait_ready();
    void request_stop() noexcept;
    /// True from the moment that the end has begun, whatever the reason.
    bool stopping() const noexcept;

  private:
    class Loop;
    struct Shared;
    explicit Supervisor(std::unique_ptr<Loop> loop);
    std::unique_ptr<Loop> loop_;
};

}  // namespace k3::launcher
