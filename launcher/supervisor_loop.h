#pragma once
// The inside of the Supervisor: what its loop knows and does. supervisor_loop.cc turns the loop,
// supervisor_stages.cc moves single stages through their states.

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "launcher/out_of_memory.h"
#include "launcher/stop_sequence.h"
#include "launcher/supervised_stage.h"
#include "launcher/supervisor.h"

namespace k3::launcher {

/// For sentences.
inline double seconds_between(Clock::time_point from, Clock::time_point to) {
    return std::chrono::duration<double>(to - from).count();
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
    // What moves a stage (supervisor_stages.cc).
    void launch(SupervisedStage& stage);
    void launch_gateway_if_others_are_ready();
    void sighted(Sighting sighting);
    void became_ready(SupervisedStage& stage, const Sighting& sighting);
    void show_waiting(SupervisedStage& stage, const std::string& waiting_for);
    void show_progress(SupervisedStage& stage, const msg::Pong& pong);
    void check_living(SupervisedStage& stage);
    void exited(SupervisedStage& stage, const Ending& ending);
    void fail(SupervisedStage& stage, Error error);
    void return_terminal() const;

    // What moves the pipeline.
    void begin_stop();
    void publish();
    std::string pipeline_state() const;

    // The loop's parts.
    int wait_ms() const;
    void wait();
    void read_signals();
    void check_timers();

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
    OutOfMemoryWatch out_of_memory_;
    StopSequence stop_;
    std::optional<Error> failure_;
};

}  // namespace k3::launcher
