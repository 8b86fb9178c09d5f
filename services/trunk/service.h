#pragma once
// The messages of a trunk stage: open, fork, drop, save and load sessions, and step rows through
// the layers.
//
// Threads: the service loop calls handle() and tend(); sessions are saved and loaded on a thread of
// their own (session_jobs.h); the connection thread only reads the counters.

#include <cstdint>
#include <string>
#include <vector>

#include "common/base/result.h"
#include "common/telemetry/counters.h"
#include "common/transport/arena.h"
#include "common/transport/messages/control.h"
#include "common/transport/messages/trunk.h"
#include "common/transport/server.h"
#include "services/trunk/session.h"
#include "services/trunk/session_directory.h"
#include "services/trunk/session_jobs.h"
#include "services/trunk/stage.h"
#include "services/trunk/step_request.h"

namespace k3::trunk {

class Service {
  public:
    /// Borrows everything; `arena` (null: none) is where outputs go when the caller reads it.
    /// `experts` is asked which service an error came from.
    Service(Stage& stage, SessionTable& sessions, const SessionDirectory& saved,
            const ExpertBackend& experts, transport::Arena* arena, std::uint32_t max_sessions,
            telemetry::Counters& counters);
    Service(const Service&) = delete;
    Service& operator=(const Service&) = delete;
    ~Service() = default;

    /// Answers any request: a result, or an error that names what is wrong with it. What is saved
    /// or loaded is answered when it is.
    void handle(transport::Request request);

    /// Gives back what saved and dropped sessions still hold; now and then, when nobody asks.
    void tend();

    /// What Hello tells about this stage.
    msg::TrunkFacts facts() const noexcept;

  private:
    Result<msg::Body> answer(const msg::Body& body, std::vector<msg::Bytes>& in,
                             std::vector<msg::Bytes>& out);
    Result<msg::StepResult> step(const msg::Step& step, std::vector<msg::Bytes>& in,
                                 std::vector<msg::Bytes>& out);
    Status start_save(msg::SaveSession save, const transport::Responder& responder);
    Status start_load(msg::LoadSession load, const transport::Responder& responder);
    void refuse(const transport::Responder& responder, Error error);
    // On the thread of the jobs:
    Result<msg::Body> save(const msg::SaveSession& save, Session& session, const GiveUp& give_up);
    Result<msg::Body> load(const msg::LoadSession& load, Session& session, const GiveUp& give_up);
    void count_sessions() noexcept;

    Stage& stage_;
    SessionTable& sessions_;
    const SessionDirectory& saved_;
    const ExpertBackend& experts_;
    transport::Arena* arena_;
    const std::uint32_t max_sessions_;
    transport::ArenaReader reader_;
    StepRequest request_;
    bool has_run_ = false;  // the current request reached the layers

    std::atomic<std::uint64_t>& n_steps_;
    std::atomic<std::uint64_t>& n_rows_;
    std::atomic<std::uint64_t>& n_logit_rows_;
    std::atomic<std::uint64_t>& n_refused_;
    std::atomic<std::uint64_t>& n_failed_;
    std::atomic<std::uint64_t>& step_ns_;
    std::atomic<std::uint64_t>& expert_wait_ns_;
    std::atomic<std::uint64_t>& in_bytes_;
    std::atomic<std::uint64_t>& out_bytes_;
    std::atomic<std::uint64_t>& n_sessions_;
    std::atomic<std::uint64_t>& session_bytes_;
    std::atomic<std::uint64_t>& n_saved_;
    std::atomic<std::uint64_t>& n_loaded_;
    std::atomic<std::uint64_t>& loaded_positions_;
    SessionJobs jobs_;  // last: its thread uses what stands before it
};

}  // namespace k3::trunk
