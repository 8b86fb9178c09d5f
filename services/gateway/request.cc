#include "services/gateway/request.h"

#include <fmt/format.h>

#include <algorithm>

#include "common/model/sampling_params.h"
#include "common/model/session_name.h"

namespace k3::gateway {

namespace {

Error invalid(std::string message, std::string remedy) {
    return Error{ErrorCode::invalid_argument, std::move(message), std::move(remedy)};
}

}  // namespace

Status check_submit(const msg::Submit& submit) {
    RETURN_IF_ERROR(model::check_sampling_params(submit.params));
    RETURN_IF_ERROR(model::check_n_logprobs(submit.n_logprobs));
    for (const std::string* name : {&submit.load_session, &submit.save_session})
        if (!name->empty()) RETURN_IF_ERROR(model::check_session_name(*name));
    if (submit.stop_strings.size() > kMaxStopStrings)
        return invalid(fmt::format("the request has {} stop strings, at most {} are allowed",
                                   submit.stop_strings.size(), kMaxStopStrings),
                       "give fewer stop strings");
    for (std::size_t i = 0; i < submit.stop_strings.size(); ++i) {
        const std::size_t n_bytes = submit.stop_strings[i].size();
        if (n_bytes == 0 || n_bytes > kMaxStopStringBytes)
            return invalid(fmt::format("stop string {} has {} bytes, 1 to {} are allowed", i,
                                       n_bytes, kMaxStopStringBytes),
                           "leave it out or shorten it");
    }
    return Status::ok();
}

Status check_ids(const std::vector<std::uint32_t>& prompt,
                 const std::vector<std::uint32_t>& stop_ids, const PipelineFacts& facts) {
    if (prompt.empty())
        return invalid("the prompt is empty: it has 0 ids", "give at least one id or character");
    if (prompt.size() > facts.max_positions)
        return invalid(fmt::format("the prompt has {} ids, but the context holds {}", prompt.size(),
                                   facts.max_positions),
                       "shorten the prompt, or start the trunk with a larger context");
    for (std::size_t i = 0; i < prompt.size(); ++i) {
        if (prompt[i] >= facts.vocab_size)
            return invalid(fmt::format("id {} at position {} of the prompt is outside the "
                                       "vocabulary of {}",
                                       prompt[i], i, facts.vocab_size),
                           fmt::format("use ids from 0 to {}", facts.vocab_size - 1));
    }
    for (std::size_t i = 0; i < stop_ids.size(); ++i) {
        if (stop_ids[i] >= facts.vocab_size)
            return invalid(fmt::format("stop id {} at position {} is outside the vocabulary of {}",
                                       stop_ids[i], i, facts.vocab_size),
                           fmt::format("use ids from 0 to {}", facts.vocab_size - 1));
    }
    return Status::ok();
}

void begin(GenerationRequest& request, std::vector<std::uint32_t> prompt,
           const PipelineFacts& facts) {
    request.ids = std::move(prompt);
    request.n_prompt = request.ids.size();
    request.n_fed = 0;
    request.context = facts.max_positions;
    request.stop_strings = StopStrings(request.submit.stop_strings);
    request.stop_ids = request.submit.stop_ids;
    if (!request.submit.ignore_eos)
        request.stop_ids.insert(request.stop_ids.end(), facts.stop_ids.begin(),
                                facts.stop_ids.end());
}

std::uint64_t positions_to_reserve(const GenerationRequest& request) noexcept {
    if (request.submit.max_tokens == 0) return request.context;
    return std::min<std::uint64_t>(request.context,
                                   request.n_prompt + std::uint64_t{request.submit.max_tokens});
}

Need need_of(const GenerationRequest& request) noexcept {
    Need need;
    need.session = request.session;
    need.position = request.n_fed;
    if (!request.transfer.has_value()) need.ids = std::span(request.ids).subspan(request.n_fed);
    need.n_prompt_left = request.n_prompt - std::min(request.n_fed, request.n_prompt);
    need.want_all = request.submit.want_logits == msg::WantLogits::all && need.n_prompt_left > 0;
    return need;
}

msg::SampleRow sample_row_of(const GenerationRequest& request) {
    const msg::SamplingParams& params = request.submit.params;
    const auto prompt_end = request.ids.begin() + static_cast<std::ptrdiff_t>(request.n_prompt);
    msg::SampleRow row;
    row.params = params;
    row.step_index = request.n_generated();
    row.n_logprobs = request.submit.n_logprobs;
    row.stop_ids = request.stop_ids;
    if (params.repetition_penalty != 1) row.prompt_ids.assign(request.ids.begin(), prompt_end);
    if (params.repetition_penalty != 1 || params.presence_penalty != 0 ||
        params.frequency_penalty != 0)
        row.generated_ids.assign(prompt_end, request.ids.end());
    return row;
}

std::optional<msg::FinishReason> limit_reached(const GenerationRequest& request) noexcept {
    const std::uint32_t max_tokens = request.submit.max_tokens;
    if (max_tokens != 0 && request.n_generated() >= max_tokens)
        return msg::FinishReason::max_tokens;
    if (request.ids.size() >= request.context) return msg::FinishReason::context_full;
    return std::nullopt;
}

}  // namespace k3::gateway
