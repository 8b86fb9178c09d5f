#include "services/sampler/sample_row.h"

#include <fmt/format.h>

#include <algorithm>

#include "common/model/sampling_params.h"
#include "services/sampler/distribution.h"
#include "services/sampler/random_stream.h"

namespace k3::sampler {

namespace {

Status check_ids(std::span<const std::uint32_t> ids, std::string_view name,
                 std::size_t vocab_size) {
    for (std::size_t i = 0; i < ids.size(); ++i) {
        if (ids[i] < vocab_size) continue;
        return Error{
            ErrorCode::invalid_argument,
            fmt::format("{}[{}] is {}, but the logits have {} ids", name, i, ids[i], vocab_size),
            "send ids of the model's own vocabulary"};
    }
    return Status::ok();
}

Status check_unnumbered_row(const msg::SampleRow& params, std::size_t vocab_size) {
    RETURN_IF_ERROR(model::check_sampling_params(params.params));
    RETURN_IF_ERROR(model::check_n_logprobs(params.n_logprobs));
    RETURN_IF_ERROR(check_ids(params.prompt_ids, "prompt_ids", vocab_size));
    RETURN_IF_ERROR(check_ids(params.generated_ids, "generated_ids", vocab_size));
    return check_ids(params.stop_ids, "stop_ids", vocab_size);
}

std::uint32_t choose(std::span<const float> logits, const msg::SampleRow& row,
                     std::uint32_t raw_argmax, Workspace& workspace) {
    const msg::SamplingParams& params = row.params;
    const bool penalised = has_penalties(params);
    if (params.temperature == 0 && !penalised) return raw_argmax;

    workspace.values.assign(logits.begin(), logits.end());
    if (penalised)
        apply_penalties(workspace.values, params, row.prompt_ids, row.generated_ids,
                        workspace.seen);
    if (params.temperature == 0) return argmax(workspace.values);

    weigh(workspace.values, params.temperature, workspace.candidates);
    keep_top_k(workspace.candidates, params.top_k);
    keep_top_p(workspace.candidates, params.top_p);
    keep_min_p(workspace.candidates, params.min_p);
    return draw(workspace.candidates, uniform(params.seed, row.step_index));
}

}  // namespace

Status check_row(const msg::SampleRow& params, std::size_t row, std::size_t vocab_size) {
    Status status = check_unnumbered_row(params, vocab_size);
    if (status.has_value()) return status;
    return std::move(status).error().with_context(fmt::format("row {}", row));
}

Result<msg::SampledRow> sample_row(std::span<const float> logits, const msg::SampleRow& params,
                                   std::size_t row, Workspace& workspace) {
    ASSIGN_OR_RETURN(const Distribution distribution, inspect(logits, row));
    msg::SampledRow out;
    out.id = choose(logits, params, distribution.argmax, workspace);
    out.logprob = logprob(logits, distribution, out.id);
    out.top = top_logprobs(logits, distribution, params.n_logprobs);
    out.is_stop =
        std::find(params.stop_ids.begin(), params.stop_ids.end(), out.id) != params.stop_ids.end();
    return out;
}

}  // namespace k3::sampler
