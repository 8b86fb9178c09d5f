#pragma once
// A client of the gateway for tests: submits, and collects everything that comes back.

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "common/transport/channel.h"

namespace k3::test {

/// All replies to one Submit.
struct Generation {
    std::optional<Error> error;  // instead of `finished`
    std::string failed_service;
    msg::Accepted accepted;
    std::optional<msg::SessionLoaded> loaded;
    std::optional<msg::SessionSaved> saved;
    std::vector<msg::PrefillProgress> progress;
    std::vector<std::uint32_t> ids;
    std::string text;
    std::vector<msg::SampledRow> logprobs;
    std::vector<float> prompt_logits;
    std::vector<float> token_logits;
    std::size_t n_events = 0;  // TokenEvents
    msg::Finished finished;
};

class GatewayClient {
  public:
    /// Greets the gateway; a gateway that is not ready within `ms` ends the test run.
    explicit GatewayClient(const std::string& endpoint, std::int64_t ms = 10000);

    std::uint64_t submit(const msg::Submit& submit);
    /// Until the last reply, or an error of this side after `ms`.
    Generation collect(std::uint64_t call_id, std::int64_t ms = 60000);
    /// `until` is asked after each event; true leaves the rest for a later collect_more().
    void collect_more(std::uint64_t call_id, Generation& into, std::int64_t ms,
                      const std::function<bool(const Generation&)>& until = nullptr);
    Generation generate(const msg::Submit& s) { return collect(submit(s)); }
    void cancel(std::uint64_t request);

    transport::Channel& channel() { return *channel_; }

  private:
    /// True if that was the last.
    bool take(transport::Reply reply, Generation& into);
    std::unique_ptr<transport::Channel> channel_;
};

msg::Submit submit_text(std::string text, std::uint32_t max_tokens);
msg::Submit submit_ids(std::vector<std::uint32_t> ids, std::uint32_t max_tokens);

}  // namespace k3::test
