#pragma once
// The gateway's messages and its main loop: takes Submit and Cancel between steps, queues what
// cannot run yet, and keeps the generation loop going.
//
// A submitted request is queued, given ids by the tokenizer ("accepted"), then started when one of
// max_requests places is free. While a stage is missing, queued requests wait for it, for wait_ms
// at most; running ones fail at once, because their sessions died with it.
//
// One thread runs it; the connection thread of the Server answers pings meanwhile.

#include <cstdint>
#include <deque>
#include <memory>
#include <string>

#include "common/base/result.h"
#include "common/telemetry/counters.h"
#include "common/transport/server.h"
#include "services/gateway/generation_loop.h"
#include "services/gateway/pipeline.h"

namespace k3::gateway {

class Service {
  public:
    struct Options {
        std::string model_name = "kimi-k3";
        Stages::Options stages;  // sessions are filled in here
        Pipeline::Options pipeline;
        std::uint32_t max_requests = 16;
        std::uint32_t max_queue = 64;       // besides the running ones; more are refused
        std::uint32_t prefill_chunk = 256;  // rows of one prompt per step
        std::int64_t wait_ms = 30'000;      // how long a request waits for a missing stage
    };
    /// `server` in state loading. `counters` outlives both, because the server's thread reads it.
    /// Error: invalid_argument (endpoints).
    static Result<std::unique_ptr<Service>> create(Options options, transport::Server& server,
                                                   telemetry::Counters& counters);
    Service(const Service&) = delete;
    Service& operator=(const Service&) = delete;
    ~Service() = default;

    /// Waits until all stages are ready and makes the server ready, or until it is stopping.
    /// Error: incompatible (see compatibility.h).
    Status connect();

    /// Serves until the server is stopping.
    void run();

  private:
    Service(Options options, transport::Server& server, telemetry::Counters& counters,
            std::unique_ptr<Stages> stages);

    void take_messages();
    void take(transport::Request request);
    void submit(transport::Request& request, msg::Submit& submit);
    void cancel(std::uint64_t handle);
    void tend_stages();
    void accept_queued();
    bool accept(GenerationRequest& request);
    void start_queued();
    void take_returned();
    void expire_queued();
    void wait();
    void end_all(const msg::Failure& failure);

    Options options_;
    transport::Server& server_;
    std::atomic<std::uint64_t>& submitted_;
    std::atomic<std::uint64_t>& refused_;
    std::unique_ptr<Stages> stages_;
    Pipeline pipeline_;
    GenerationLoop loop_;
    std::deque<RequestPtr> queue_;
    Clock::time_point missing_since_;
    std::uint64_t n_handles_ = 0;
};

}  // namespace k3::gateway
