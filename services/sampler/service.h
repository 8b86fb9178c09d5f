#pragma once
// The sampler's one message: Sample in, Sampled out. It remembers nothing between calls.
//
// Threads: the service loop calls handle(); the connection thread only reads the counters.

#include <cstdint>

#include "common/telemetry/counters.h"
#include "common/transport/arena.h"
#include "common/transport/server.h"
#include "services/sampler/sample_row.h"

namespace k3::sampler {

class Service {
  public:
    /// `max_rows`: more rows in a call are refused.
    explicit Service(std::uint32_t max_rows);
    Service(const Service&) = delete;
    Service& operator=(const Service&) = delete;
    ~Service() = default;

    /// Answers any request: Sampled, or an error that names what is wrong with it.
    void handle(transport::Request request);

    /// One token per row of the logits.
    /// Errors: invalid_argument (parameters, shapes, payload), corrupt (a logit that is no number),
    /// stale and not_found (shared memory).
    Result<msg::Sampled> sample(const msg::Sample& call, std::vector<msg::Bytes>& frames);

    const telemetry::Counters& counters() const noexcept { return counters_; }

  private:
    std::uint32_t max_rows_;
    transport::ArenaReader reader_;
    Workspace workspace_;
    telemetry::Counters counters_;
    std::atomic<std::uint64_t>& calls_;
    std::atomic<std::uint64_t>& refused_calls_;
    std::atomic<std::uint64_t>& tokens_;
    std::atomic<std::uint64_t>& compute_ns_;
};

}  // namespace k3::sampler
