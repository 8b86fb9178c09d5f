#pragma once
// The state of one request, from its message to its last event.

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "common/base/deadline.h"
#include "common/base/result.h"
#include "common/transport/messages/gateway.h"
#include "common/transport/server.h"
#include "services/gateway/compatibility.h"
#include "services/gateway/pipeline.h"
#include "services/gateway/step_plan.h"
#include "services/gateway/stop_strings.h"

namespace k3::gateway {

struct GenerationRequest {
    std::uint64_t handle = 0;  // for Cancel
    msg::Submit submit;
    transport::Responder client;
    Clock::time_point arrived;

    bool accepted = false;           // has ids, and the client knows them
    std::vector<std::uint32_t> ids;  // prompt, then generated; stop ids included
    std::size_t n_prompt = 0;
    std::uint64_t context = 0;  // most ids the request may have
    std::uint64_t session = 0;  // on every trunk stage; 0: none is open
    std::size_t n_fed = 0;      // ids that the trunk has computed
    std::string pending;        // bytes of an incomplete character, held by the decoder
    StopStrings stop_strings;
    std::vector<std::uint32_t> stop_ids;  // the model's own and the request's

    // While its session is loaded, or saved: it takes no part in steps.
    std::optional<SessionTransfer> transfer;
    msg::Finished finished;  // to be sent when the session has been saved

    Clock::time_point prefill_started;
    Clock::time_point decode_started;

    std::size_t n_generated() const noexcept { return ids.size() - n_prompt; }
    bool prompt_done() const noexcept { return n_fed >= n_prompt; }
    bool is_loading() const noexcept {
        return transfer.has_value() && std::holds_alternative<msg::LoadSession>(transfer->request);
    }
    bool is_saving() const noexcept { return transfer.has_value() && !is_loading(); }
};

inline constexpr std::size_t kMaxStopStrings = 16;
inline constexpr std::size_t kMaxStopStringBytes = 4096;

/// What can be judged without any stage.
/// Error: invalid_argument naming field, value and range.
Status check_submit(const msg::Submit& submit);

/// What can be judged before any compute. Error: invalid_argument: no ids at all, more than the
/// context holds (both numbers), an id or stop id outside the vocabulary (id, position, size).
Status check_ids(const std::vector<std::uint32_t>& prompt,
                 const std::vector<std::uint32_t>& stop_ids, const PipelineFacts& facts);

/// Takes the prompt: from here on the request can be scheduled.
void begin(GenerationRequest& request, std::vector<std::uint32_t> prompt,
           const PipelineFacts& facts);

/// Positions to reserve for the session: prompt and max_tokens, within the context.
std::uint64_t positions_to_reserve(const GenerationRequest& request) noexcept;

Need need_of(const GenerationRequest& request) noexcept;

/// What the sampler is told; the histories only if a penalty reads them.
msg::SampleRow sample_row_of(const GenerationRequest& request);

/// Whether the request may have no further id, and why; max_tokens before context_full.
std::optional<msg::FinishReason> limit_reached(const GenerationRequest& request) noexcept;

}  // namespace k3::gateway
