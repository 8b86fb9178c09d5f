#pragma once
// One generation through a gateway: submit, receive the stream, give up when told to.

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>

#include "common/base/deadline.h"
#include "common/base/result.h"
#include "common/transport/arena.h"
#include "common/transport/channel.h"
#include "common/transport/curve_keys.h"
#include "common/transport/messages/gateway.h"

namespace k3::launcher {

/// What comes out of a generation, in this order: accepted once, session_loaded if asked for,
/// progress and tokens, session_saved if asked for.
class GenerationSink {
  public:
    virtual ~GenerationSink() = default;
    virtual Status accepted(const msg::Accepted& accepted) = 0;
    virtual Status session_loaded(const msg::SessionLoaded&) { return Status::ok(); }
    virtual void progress(const msg::PrefillProgress& progress) = 0;
    /// `logits`: [n_rows, vocab_size] as the event says, empty if none were asked for.
    virtual Status tokens(const msg::TokenEvent& event, std::span<const float> logits) = 0;
    virtual Status session_saved(const msg::SessionSaved&) { return Status::ok(); }
};

class GatewayClient {
  public:
    /// Says hello until the gateway is ready. `give_up` as in generate().
    /// `keys` (null: none) count if it is on tcp. Errors: those of Channel::hello, cancelled.
    static Result<GatewayClient> connect(const std::string& endpoint, std::uint64_t run_id,
                                         std::shared_ptr<const transport::CurveKeys> keys,
                                         Deadline deadline, const std::function<bool()>& give_up);

    const msg::GatewayFacts& facts() const noexcept { return facts_; }

    /// Runs one request to its end. `give_up` is asked about ten times a second; once it says true
    /// the request is cancelled at the gateway and `cancelled` returned.
    /// Errors: whatever the gateway answers (with the service's name), and those of the sink.
    Result<msg::Finished> generate(const msg::Submit& submit, GenerationSink& sink,
                                   const std::function<bool()>& give_up);

  private:
    GatewayClient() = default;
    Status deliver(transport::Reply& reply, GenerationSink& sink);
    Error cancel(std::uint64_t call);

    std::unique_ptr<transport::Channel> channel_;
    std::unique_ptr<transport::ArenaReader> reader_;
    msg::GatewayFacts facts_;
    std::uint64_t request_ = 0;  // the gateway's handle; 0: not accepted yet
};

}  // namespace k3::launcher
