#pragma once
// How all stages of a pipeline end: asked in order, then forced.
//
// Whoever calls others is stopped before them: the gateway, then the trunk, then expert servers,
// tokenizer and sampler. All at once would end as well, but every caller that outlives the service
// it calls says that it has lost it, and a reader of those warnings cannot tell them from trouble.
//
//   from the beginning    stage
//   0 ms                  the gateway gets SIGTERM
//   when it has ended     the trunk stages
//   when they have ended  the others. Each wait takes kWaveMs at most.
//   grace_ms, or hurry()  whoever still runs gets SIGKILL
//
// The supervisor's loop calls everything.

#include <cstdint>
#include <vector>

#include "common/base/deadline.h"
#include "launcher/events.h"
#include "launcher/starter.h"
#include "launcher/supervised_stage.h"

namespace k3::launcher {

class StopSequence {
  public:
    /// Borrows everything. `grace_ms`: from the beginning to SIGKILL.
    StopSequence(std::vector<SupervisedStage>& stages, ProcessStarter& starter,
                 const EventLog& events, std::int64_t grace_ms)
        : stages_(stages), starter_(starter), events_(events), grace_ms_(grace_ms) {}

    /// Every stage is told in its state, the first processes are asked.
    void begin(Clock::time_point now);
    bool begun() const noexcept { return begun_; }
    /// Asked again: no more patience.
    void hurry(Clock::time_point now);
    /// Asks or kills who is due. Called in every round of the loop.
    void advance(Clock::time_point now);
    /// Nobody is left, or the kernel does not end what was killed.
    bool finished(Clock::time_point now) const;

    /// How long a wave may delay the next one.
    static constexpr std::int64_t kWaveMs = 800;

  private:
    void ask_wave(Clock::time_point now);
    bool any_process_up_to(int wave) const;
    void kill_all();

    std::vector<SupervisedStage>& stages_;
    ProcessStarter& starter_;
    const EventLog& events_;
    std::int64_t grace_ms_;
    bool begun_ = false;
    bool killed_ = false;
    int wave_ = 0;                // the last that was asked
    Clock::time_point begun_at_;  // moved back by hurry()
    Clock::time_point wave_at_;
};

}  // namespace k3::launcher
