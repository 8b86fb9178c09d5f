#include "services/trunk/step_request.h"

#include <algorithm>
#include <cmath>
#include <string>

#include "common/transport/tensor_io.h"

namespace k3::trunk {

namespace {

std::string row_name(std::size_t row, const msg::StepRow& from) {
    return "row " + std::to_string(row) + " (session " + std::to_string(from.session) +
           ", position " + std::to_string(from.position) + ")";
}

Status check_token(const model::ModelConfig& config, std::size_t row, const msg::StepRow& from) {
    if (from.token >= config.vocab_size)
        return Error{ErrorCode::invalid_argument,
                     row_name(row, from) + " has token " + std::to_string(from.token) +
                         ", the vocabulary ends at " + std::to_string(config.vocab_size - 1),
                     "use the tokenizer of the same checkpoint"};
    if (from.token == config.media_placeholder_id)
        return Error{
            ErrorCode::unsupported,
            row_name(row, from) + " has token " + std::to_string(from.token) +
                ", the placeholder of an image, and this pipeline reads text only",
            "take the image out of the prompt; if the model has chosen that token itself, ask with "
            "another seed, temperature or prompt"};
    return Status::ok();
}

Status check_position(std::size_t row, const msg::StepRow& from, std::uint64_t next,
                      const Session& session) {
    if (from.position != next)
        return Error{ErrorCode::stale,
                     row_name(row, from) + " is out of turn: the session's next position is " +
                         std::to_string(next),
                     "send every position once, in order, or drop the session and begin again"};
    if (next >= session.max_positions())
        return Error{ErrorCode::resource_exhausted,
                     row_name(row, from) + " does not fit: the session was opened for " +
                         std::to_string(session.max_positions()) + " positions",
                     "open the session for more positions"};
    return Status::ok();
}

}  // namespace

Status StepRequest::read(const msg::Step& step, std::vector<msg::Bytes>& frames,
                         transport::ArenaReader& reader, const Stage& stage,
                         SessionTable& sessions) {
    RETURN_IF_ERROR(read_rows(step, stage, sessions));
    RETURN_IF_ERROR(read_want(step));
    return read_hidden(step, frames, reader, stage);
}

Status StepRequest::read_rows(const msg::Step& step, const Stage& stage, SessionTable& sessions) {
    if (step.rows.empty() || step.rows.size() > stage.max_step_rows())
        return Error{ErrorCode::invalid_argument,
                     "a step of " + std::to_string(step.rows.size()) +
                         " rows was asked for, this stage takes 1 to " +
                         std::to_string(stage.max_step_rows()),
                     "split the step, or start k3-trunk with a larger --max-step-rows"};
    rows_.clear();
    next_.clear();
    for (std::size_t r = 0; r < step.rows.size(); ++r) {
        const msg::StepRow& from = step.rows[r];
        ASSIGN_OR_RETURN(Session * session, sessions.find(from.session));
        auto next = std::find_if(next_.begin(), next_.end(),
                                 [&](const Next& n) { return n.session == session; });
        if (next == next_.end()) next = next_.insert(next, {session, session->position()});
        RETURN_IF_ERROR(check_position(r, from, next->position, *session));
        if (stage.range().is_first()) RETURN_IF_ERROR(check_token(stage.config(), r, from));
        rows_.push_back({session, next->position++, from.token});
    }
    return Status::ok();
}

Status StepRequest::read_want(const msg::Step& step) {
    for (std::size_t i = 0; i < step.want.size(); ++i) {
        if (step.want[i] < step.rows.size() && (i == 0 || step.want[i - 1] < step.want[i]))
            continue;
        return Error{ErrorCode::invalid_argument,
                     "want[" + std::to_string(i) + "] is " + std::to_string(step.want[i]) +
                         ": wanted rows must ascend and lie below the step's " +
                         std::to_string(step.rows.size()) + " rows",
                     "name every wanted row once, in order"};
    }
    wanted_ = step.want;
    return Status::ok();
}

Status StepRequest::read_hidden(const msg::Step& step, std::vector<msg::Bytes>& frames,
                                transport::ArenaReader& reader, const Stage& stage) {
    hidden_.clear();
    if (stage.range().is_first()) {
        if (step.hidden.empty()) return Status::ok();
        return Error{ErrorCode::invalid_argument,
                     "the step carries rows of another stage, but this stage begins at layer 0 and "
                     "takes tokens",
                     "give the trunk stages in the order of their layers"};
    }
    const std::uint64_t shape[] = {step.rows.size(), stage.in_vectors(),
                                   stage.config().hidden_size};
    ASSIGN_OR_RETURN(hidden_, transport::take_tensor(step.hidden, "hidden", msg::DType::f32, shape,
                                                     frames, reader));
    const std::span<const float> values = transport::view_as<float>(hidden_);
    const auto bad = std::find_if_not(values.begin(), values.end(),
                                      [](float value) { return std::isfinite(value); });
    if (bad == values.end()) return Status::ok();
    const auto row = static_cast<std::size_t>(bad - values.begin()) / (shape[1] * shape[2]);
    return Error{ErrorCode::corrupt,
                 "hidden holds a value that is not finite in " + row_name(row, step.rows[row]),
                 "look for the cause in the stage before"};
}

StepInput StepRequest::input() const noexcept {
    return {rows_, transport::view_as<float>(hidden_), wanted_};
}

}  // namespace k3::trunk
