#pragma once
// Starts the stages of a pipeline, watches them, restarts what died, stops everything.
//
// One loop waits for everything at once: processes that end (pidfd), what they print (pipes), how
// they answer (the watchers' mailbox), signals, and its own timers. The states of a stage are the
// table in stage_states.h; what is behind this interface is in supervisor_loop.h.
//
// Start: every stage at once, but the gateway only when all others are ready, because it is the one
// that a client can reach. Readiness is what a stage says of itself; nothing sleeps and hopes.
//
// Threads: run() is the loop and owns everything; request_stop, wait_ready and stopping may be
// called from any thread.

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "common/base/result.h"
#include "launcher/events.h"
#include "launcher/janitor.h"
#include "launcher/run_directory.h"
#include "launcher/stage_plan.h"
#include "launcher/starter.h"
#include "launcher/supervisor_options.h"

namespace k3::launcher {

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
