#include "services/gateway/pipeline.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <variant>

#include "common/transport/tensor_io.h"

namespace k3::gateway {

namespace {

constexpr std::size_t kDecodeBatch = 8;  // the queues in between are short

/// [n, width] as an inline tensor.
StageOutput inline_rows(std::vector<std::uint64_t> shape, msg::Bytes bytes) {
    StageOutput out;
    out.tensor.dtype = msg::DType::f32;
    out.tensor.shape = std::move(shape);
    out.tensor.payload = msg::InlinePayload{1};
    out.frames.push_back(std::move(bytes));
    return out;
}

}  // namespace

Pipeline::Pipeline(const Options& options, Stages& stages) : options_(options), stages_(stages) {}

/// The reply as a T; any other message is the stage's fault.
template <typename T>
Result<T> Pipeline::answer(Stage& stage, Result<transport::Reply> reply) {
    const bool answered = reply.has_value();
    auto body = transport::expect<T>(std::move(reply), stage.name);
    if (!body.has_value() && answered) return stages_.blame(stage, std::move(body).error());
    return body;
}

/// Whether a reply is a T, without taking it.
template <typename T>
Status Pipeline::is_answer(Stage& stage, const Result<transport::Reply>& reply) {
    if (!reply.has_value()) return reply.error();
    if (std::holds_alternative<T>(reply->body)) return Status::ok();
    return stages_.blame(
        stage, transport::expect<T>(Result<transport::Reply>(transport::Reply{reply->body, {}}),
                                    stage.name)
                   .error());
}

template <typename T>
Result<T> Pipeline::ask(Stage& stage, msg::Body body, std::int64_t wait_ms,
                        std::vector<msg::Bytes>&& frames, std::vector<msg::Bytes>* answered) {
    auto reply =
        stages_.call(stage, std::move(body), std::move(frames), Deadline::after_ms(wait_ms));
    if (reply.has_value() && answered != nullptr) *answered = std::move(reply->frames);
    return answer<T>(stage, std::move(reply));
}

Result<std::vector<std::uint32_t>> Pipeline::encode(const msg::Submit& submit) {
    if (const auto* ids = std::get_if<msg::IdsInput>(&submit.input)) return ids->ids;
    Stage& tokenizer = stages_.tokenizer();
    if (const auto* text = std::get_if<msg::TextInput>(&submit.input)) {
        ASSIGN_OR_RETURN(
            msg::Encoded encoded,
            ask<msg::Encoded>(tokenizer, msg::Encode{text->text, submit.recognise_specials, false},
                              options_.call_wait_ms));
        return std::move(encoded.ids);
    }
    const auto& chat = std::get<msg::ChatInput>(submit.input);
    ASSIGN_OR_RETURN(
        msg::RenderedChat rendered,
        ask<msg::RenderedChat>(tokenizer, msg::RenderChat{chat.json}, options_.call_wait_ms));
    return std::move(rendered.ids);
}

Status Pipeline::open_session(std::uint64_t session, std::uint64_t max_positions,
                              const std::string& save_as) {
    for (std::size_t i = 0; i < stages_.n_trunk(); ++i) {
        const auto done =
            ask<msg::Done>(stages_.trunk(i), msg::OpenSession{session, max_positions, save_as},
                           options_.call_wait_ms);
        if (done.has_value()) continue;
        if (i > 0) stages_.drop_sessions(std::span(&session, 1));
        return done.error();
    }
    return Status::ok();
}

Result<SessionTransfer> Pipeline::begin(msg::Body save_or_load) {
    SessionTransfer transfer;
    transfer.request = std::move(save_or_load);
    transfer.deadline = Deadline::after_ms(options_.step_wait_ms);
    transfer.answers.resize(stages_.n_trunk());
    for (std::size_t i = 0; i < stages_.n_trunk(); ++i) {
        const auto id = stages_.send(stages_.trunk(i), transfer.request, {});
        if (id.has_value()) {
            transfer.calls.push_back({*id, {}});
            continue;
        }
        give_up(transfer);
        return id.error();
    }
    return transfer;
}

Result<bool> Pipeline::poll(SessionTransfer& transfer, std::int64_t wait_ms) {
    bool is_over = true;
    for (std::size_t i = 0; i < transfer.calls.size(); ++i) {
        if (transfer.answers[i].has_value()) continue;
        Stage& stage = stages_.trunk(i);
        auto reply = stages_.poll(stage, transfer.calls[i], wait_ms);
        if (!reply.has_value() && transfer.deadline.expired())
            reply = stages_.blame(stage, *transfer.calls[i].silence);
        if (!reply.has_value()) {
            is_over = false;
            continue;
        }
        const bool is_load = std::holds_alternative<msg::LoadSession>(transfer.request);
        Status sound = is_load ? is_answer<msg::LoadedSession>(stage, *reply)
                               : is_answer<msg::SavedSession>(stage, *reply);
        if (!sound.has_value()) {
            give_up(transfer);
            return std::move(sound).error();
        }
        transfer.answers[i] = std::move((*reply)->body);
    }
    return is_over;
}

void Pipeline::give_up(const SessionTransfer& transfer) {
    for (std::size_t i = 0; i < transfer.calls.size(); ++i)
        if (!transfer.answers[i].has_value())
            stages_.trunk(i).channel->forget(transfer.calls[i].id);
    if (const auto* load = std::get_if<msg::LoadSession>(&transfer.request))
        stages_.drop_sessions(std::span(&load->session, 1));
}

Result<msg::LoadedSession> Pipeline::loaded(const SessionTransfer& transfer) {
    const auto& load = std::get<msg::LoadSession>(transfer.request);
    const auto& first = std::get<msg::LoadedSession>(*transfer.answers.front());
    const auto refuse = [&](Stage& stage, Error error) {
        stages_.drop_sessions(std::span(&load.session, 1));
        return stages_.blame(stage, std::move(error));
    };
    for (std::size_t i = 1; i < transfer.answers.size(); ++i) {
        const auto& other = std::get<msg::LoadedSession>(*transfer.answers[i]);
        // The same ids give the same state, whoever saved it; so the counts tell all there is.
        if (other == first) continue;
        return refuse(
            stages_.trunk(i),
            {ErrorCode::incompatible,
             fmt::format("the files of session '{}' do not belong together: that of {} stands "
                         "for {} ids, {} of them the prompt's, that of {} for {} and {}",
                         load.name, stages_.trunk(0).name, first.n_ids, first.n_agreed,
                         stages_.trunk(i).name, other.n_ids, other.n_agreed),
             "save the session again; a stage was stopped while it was saved"});
    }
    if (first.position == 0 || (first.position == first.n_ids && first.position < load.ids.size()))
        return first;
    return refuse(stages_.trunk(0),
                  {ErrorCode::internal,
                   fmt::format("{} loaded {} of {} positions for a prompt of {} ids",
                               stages_.trunk(0).name, first.position, first.n_ids, load.ids.size()),
                   "use the same program version for all services"});
}

std::uint64_t Pipeline::saved_bytes(const SessionTransfer& transfer) {
    std::uint64_t bytes = 0;
    for (const std::optional<msg::Body>& answer : transfer.answers)
        bytes += std::get<msg::SavedSession>(*answer).bytes;
    return bytes;
}

Result<Logits> Pipeline::step(const StepPlan& plan) {
    StageOutput rows;
    for (std::size_t i = 0; i < stages_.n_trunk(); ++i) {
        ASSIGN_OR_RETURN(rows, run_stage(i, plan, std::move(rows)));
    }
    Logits logits;
    logits.output = std::move(rows);
    logits.sampler_reads = stages_.sampler().reads_previous;
    return logits;
}

Result<StageOutput> Pipeline::run_stage(std::size_t i, const StepPlan& plan, StageOutput hidden) {
    Stage& stage = stages_.trunk(i);
    const bool last = i + 1 == stages_.n_trunk();
    if (i > 0) {
        ASSIGN_OR_RETURN(hidden,
                         forward(stages_.trunk(i - 1), std::move(hidden), stage.reads_previous));
    }
    msg::Step body;
    body.rows = plan.rows;
    body.hidden = std::move(hidden.tensor);
    if (last) body.want = plan.want;
    // If only the next stage, and not this process, could open the arena, inline is the safe way.
    body.reply_shm = stage.gateway_reads;
    StageOutput out;
    ASSIGN_OR_RETURN(msg::StepResult result,
                     ask<msg::StepResult>(stage, std::move(body), options_.step_wait_ms,
                                          std::move(hidden.frames), &out.frames));
    out.tensor = std::move(result.output);

    const PipelineFacts& facts = stages_.facts();
    const auto& own = std::get<msg::TrunkFacts>(stage.announcement.facts);
    const std::vector<std::uint64_t> expected =
        last ? std::vector<std::uint64_t>{plan.want.size(), facts.vocab_size}
             : std::vector<std::uint64_t>{plan.rows.size(), own.out_vectors, facts.hidden_size};
    const bool nothing_wanted = last && plan.want.empty();
    if (!nothing_wanted && (out.tensor.shape != expected || out.tensor.dtype != msg::DType::f32))
        return stages_.blame(
            stage, {ErrorCode::internal,
                    fmt::format("{} answered a step of {} rows with a tensor of shape [{}] instead "
                                "of f32 [{}]",
                                stage.name, plan.rows.size(), fmt::join(out.tensor.shape, ", "),
                                fmt::join(expected, ", ")),
                    "use the same program version for all services"});
    return out;
}

Status Pipeline::load(Stage& owner, StageOutput& output, msg::Bytes& bytes) {
    auto taken =
        transport::take_tensor(output.tensor, "the output of " + owner.name, msg::DType::f32,
                               output.tensor.shape, output.frames, stages_.reader());
    if (!taken.has_value()) return stages_.blame(owner, std::move(taken).error());
    bytes = std::move(*taken);
    return Status::ok();
}

Result<StageOutput> Pipeline::forward(Stage& owner, StageOutput output, bool reader_can) {
    if (reader_can && std::holds_alternative<msg::ShmPayload>(output.tensor.payload)) return output;
    msg::Bytes bytes;
    RETURN_IF_ERROR(load(owner, output, bytes));
    return inline_rows(std::move(output.tensor.shape), std::move(bytes));
}

Result<msg::Bytes> Pipeline::rows(Logits& logits, std::size_t first, std::size_t n) {
    if (!logits.loaded) {
        RETURN_IF_ERROR(load(stages_.trunk(stages_.n_trunk() - 1), logits.output, logits.bytes));
        logits.loaded = true;
    }
    const std::size_t row_bytes = stages_.facts().vocab_size * sizeof(float);
    const auto begin = logits.bytes.begin() + static_cast<std::ptrdiff_t>(first * row_bytes);
    return msg::Bytes(begin, begin + static_cast<std::ptrdiff_t>(n * row_bytes));
}

std::vector<Result<msg::SampledRow>> Pipeline::sample(Logits& logits, std::vector<SampleJob> jobs) {
    std::vector<Result<msg::SampledRow>> out;
    const std::size_t batch = stages_.facts().max_sample_rows;
    for (std::size_t begin = 0; begin < jobs.size(); begin += batch) {
        const auto part = std::span(jobs).subspan(begin, std::min(batch, jobs.size() - begin));
        auto sampled = sample_call(logits, part);
        if (sampled.has_value()) {
            for (msg::SampledRow& row : *sampled) out.emplace_back(std::move(row));
            continue;
        }
        if (!stages_.ready() || part.size() == 1) {
            out.insert(out.end(), part.size(), sampled.error());
            continue;
        }
        // The call is pure: alone, only the row that is to blame is refused.
        for (std::size_t i = 0; i < part.size(); ++i) {
            auto alone = sample_call(logits, part.subspan(i, 1));
            if (alone.has_value()) {
                out.emplace_back(std::move(alone->front()));
            } else {
                out.emplace_back(std::move(alone).error());
            }
        }
    }
    return out;
}

Result<std::vector<msg::SampledRow>> Pipeline::sample_call(Logits& logits,
                                                           std::span<const SampleJob> jobs) {
    Stage& sampler = stages_.sampler();
    StageOutput input;
    // The reference names all rows, so it serves only if all are sampled, in order.
    bool whole = jobs.size() == logits.output.tensor.shape[0];
    for (std::size_t i = 0; i < jobs.size(); ++i) whole = whole && jobs[i].want == i;
    if (whole && logits.sampler_reads &&
        std::holds_alternative<msg::ShmPayload>(logits.output.tensor.payload)) {
        input.tensor = logits.output.tensor;
    } else {
        RETURN_IF_ERROR(make_inline(logits, jobs, input));
    }
    msg::Sample body;
    body.logits = std::move(input.tensor);
    for (const SampleJob& job : jobs) body.rows.push_back(job.row);
    ASSIGN_OR_RETURN(msg::Sampled sampled,
                     ask<msg::Sampled>(sampler, std::move(body), options_.call_wait_ms,
                                       std::move(input.frames)));
    const std::uint32_t vocab_size = stages_.facts().vocab_size;
    bool sound = sampled.rows.size() == jobs.size();
    for (const msg::SampledRow& row : sampled.rows) sound = sound && row.id < vocab_size;
    if (!sound)
        return stages_.blame(
            sampler, {ErrorCode::internal,
                      fmt::format("{} answered {} rows with {} tokens, or with an id outside the "
                                  "vocabulary of {}",
                                  sampler.name, jobs.size(), sampled.rows.size(), vocab_size),
                      "use the same program version for all services"});
    return std::move(sampled.rows);
}

Status Pipeline::make_inline(Logits& logits, std::span<const SampleJob> jobs, StageOutput& out) {
    const std::size_t vocab_size = stages_.facts().vocab_size;
    msg::Bytes all;
    for (const SampleJob& job : jobs) {
        ASSIGN_OR_RETURN(const msg::Bytes row, rows(logits, job.want, 1));
        all.insert(all.end(), row.begin(), row.end());
    }
    out = inline_rows({jobs.size(), vocab_size}, std::move(all));
    return Status::ok();
}

std::vector<Result<msg::Decoded>> Pipeline::decode(std::vector<msg::Decode> pieces) {
    Stage& tokenizer = stages_.tokenizer();
    std::vector<Result<msg::Decoded>> out;
    for (std::size_t begin = 0; begin < pieces.size(); begin += kDecodeBatch) {
        const std::size_t end = std::min(begin + kDecodeBatch, pieces.size());
        std::vector<Result<std::uint64_t>> calls;
        for (std::size_t i = begin; i < end; ++i)
            calls.push_back(stages_.send(tokenizer, std::move(pieces[i]), {}));
        const Deadline deadline = Deadline::after_ms(options_.call_wait_ms);
        for (const auto& call_id : calls) {
            if (!call_id.has_value()) {
                out.emplace_back(call_id.error());
                continue;
            }
            out.push_back(
                answer<msg::Decoded>(tokenizer, stages_.receive(tokenizer, *call_id, deadline)));
        }
    }
    return out;
}

}  // namespace k3::gateway
