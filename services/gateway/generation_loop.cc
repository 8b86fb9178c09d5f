#include "services/gateway/generation_loop.h"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <utility>

#include "common/base/check.h"
#include "common/base/log.h"

namespace k3::gateway {

namespace {

/// Rows of one prompt per step when the logits of all of them are wanted: 64 rows of the released
/// vocabulary are 42 MB.
constexpr std::size_t kMaxWantRows = 64;

std::uint64_t ns_between(Clock::time_point from, Clock::time_point to) {
    return static_cast<std::uint64_t>(
        std::chrono::duration_cast<std::chrono::nanoseconds>(to - from).count());
}

/// Logits for a client: always inline, it may be on another box.
msg::Tensor client_tensor(std::size_t n_rows, std::uint32_t vocab_size) {
    msg::Tensor tensor;
    tensor.dtype = msg::DType::f32;
    tensor.shape = {n_rows, vocab_size};
    tensor.payload = msg::InlinePayload{1};
    return tensor;
}

}  // namespace

GenerationLoop::GenerationLoop(const Options& options, Pipeline& pipeline,
                               telemetry::Counters& counters)
    : options_(options),
      pipeline_(pipeline),
      session_used_(options.max_requests, false),
      steps_(counters.add("steps")),
      step_rows_(counters.add("step_rows")),
      prompt_tokens_(counters.add("prompt_tokens")),
      reused_tokens_(counters.add("reused_tokens")),
      generated_tokens_(counters.add("generated_tokens")),
      finished_(counters.add("finished_requests")),
      cancelled_(counters.add("cancelled_requests")),
      failed_(counters.add("failed_requests")),
      clients_gone_(counters.add("clients_gone")) {}

bool GenerationLoop::full() const noexcept {
    const Stages& stages = pipeline_.stages();
    return running_.size() >= options_.max_requests ||
           running_.size() >= stages.facts().max_sessions;
}

Status GenerationLoop::start(RequestPtr& request) {
    const auto slot = std::find(session_used_.begin(), session_used_.end(), false);
    K3_CHECK(slot != session_used_.end(), "start() was called when full");
    const std::uint64_t session =
        options_.first_session + static_cast<std::uint64_t>(slot - session_used_.begin());
    request->prefill_started = Clock::now();
    RETURN_IF_ERROR(open(*request, session));
    *slot = true;
    request->session = session;
    running_.push_back(std::move(request));
    return Status::ok();
}

/// An empty session, or one that a saved state will take to the end of its ids.
Status GenerationLoop::open(GenerationRequest& request, std::uint64_t session) {
    const std::uint64_t max_positions = positions_to_reserve(request);
    const msg::Submit& submit = request.submit;
    if (submit.load_session.empty())
        return pipeline_.open_session(session, max_positions, submit.save_session);
    ASSIGN_OR_RETURN(request.transfer,
                     pipeline_.begin(msg::LoadSession{session, max_positions, submit.load_session,
                                                      request.ids, submit.save_session}));
    return Status::ok();
}

std::vector<GenerationLoop::Returned> GenerationLoop::take_returned() {
    return std::exchange(returned_, {});
}

bool GenerationLoop::computes() const noexcept {
    return std::any_of(running_.begin(), running_.end(),
                       [](const RequestPtr& request) { return !request->transfer.has_value(); });
}

void GenerationLoop::move_sessions() {
    const std::int64_t wait_ms = computes() ? 0 : 1;  // nobody else has to wait then
    for (RequestPtr& request : running_) {
        if (!request->transfer.has_value() || !pipeline_.stages().ready()) continue;
        const Result<bool> moved = pipeline_.poll(*request->transfer, wait_ms);
        if (moved.has_value() && !*moved) continue;
        if (request->is_loading())
            end_load(*request, moved);
        else if (moved.has_value())
            end_save(*request, std::nullopt);
        else
            end_save(*request, pipeline_.stages().failure());
    }
    std::erase(running_, nullptr);  // those given back
    remove_ended();
}

void GenerationLoop::end_load(GenerationRequest& request, const Result<bool>& moved) {
    auto loaded = moved.has_value() ? pipeline_.loaded(*request.transfer)
                                    : Result<msg::LoadedSession>(moved.error());
    request.transfer.reset();
    if (!loaded.has_value()) {
        return give_back(request, pipeline_.stages().failure());
    }
    request.n_fed = loaded->position;
    reused_tokens_ += loaded->position;
    // A client that is gone is noticed at the next event.
    request.client.send(msg::SessionLoaded{static_cast<std::uint32_t>(loaded->n_ids),
                                           static_cast<std::uint32_t>(loaded->n_agreed),
                                           static_cast<std::uint32_t>(loaded->position)});
}

bool GenerationLoop::cancel(std::uint64_t handle) {
    const auto it = std::find_if(running_.begin(), running_.end(),
                                 [&](const RequestPtr& r) { return r->handle == handle; });
    if (it == running_.end()) return false;
    GenerationRequest& request = **it;
    if (request.is_saving()) return true;  // the text is complete; it ends when it is saved
    if (request.is_loading()) pipeline_.give_up(*request.transfer);
    request.transfer.reset();
    msg::TokenEvent rest;
    rest.text = request.stop_strings.flush();
    if (!rest.text.empty()) request.client.send(std::move(rest));
    finish(request, nullptr, msg::FinishReason::cancelled);
    remove_ended();
    return true;
}

void GenerationLoop::fail_all(const msg::Failure& failure) {
    for (auto& request : running_) {
        if (request->is_saving())  // the text is complete
            end_save(*request, failure);
        else
            fail(*request, failure);
    }
    remove_ended();
}

StepPlan GenerationLoop::plan() {
    std::vector<Need> needs;
    needs.reserve(running_.size());
    for (const auto& request : running_) needs.push_back(need_of(*request));
    const StepLimits limits{pipeline_.stages().facts().max_step_rows, options_.prefill_chunk,
                            kMaxWantRows};
    return plan_step(needs, limits, turn_++);
}

void GenerationLoop::step() {
    move_sessions();
    if (!computes() || !pipeline_.stages().ready()) return;
    const StepPlan step_plan = plan();
    auto logits = pipeline_.step(step_plan);
    if (!logits.has_value()) {
        // A step that fails leaves every session it names unusable.
        if (pipeline_.stages().ready()) {
            const msg::Failure failure = pipeline_.stages().failure();
            for (const Share& share : step_plan.shares) fail(*running_[share.request], failure);
            remove_ended();
        }
        return;
    }
    ++steps_;
    step_rows_ += step_plan.rows.size();
    report_prompts(step_plan, *logits);
    std::vector<Turn> turns = sample(step_plan, *logits);
    if (pipeline_.stages().ready()) decode(turns);
    if (pipeline_.stages().ready()) {
        for (Turn& turn : turns) send_token(turn, *logits);
    }
    remove_ended();
}

/// Counts the rows that were fed and tells clients how far their prompts are.
void GenerationLoop::report_prompts(const StepPlan& plan, Logits& logits) {
    for (const Share& share : plan.shares) {
        GenerationRequest& request = *running_[share.request];
        const std::size_t before = request.n_fed;
        request.n_fed += share.n_rows;
        if (before >= request.n_prompt) continue;
        prompt_tokens_ += std::min(request.n_fed, request.n_prompt) - before;
        if (request.prompt_done()) request.decode_started = Clock::now();
        bool there =
            request.client.send(msg::PrefillProgress{static_cast<std::uint32_t>(request.n_fed),
                                                     static_cast<std::uint32_t>(request.n_prompt)});
        if (there && request.submit.want_logits == msg::WantLogits::all) {
            auto bytes = pipeline_.rows(logits, share.first_want, share.n_want);
            if (!bytes.has_value()) {
                fail(request, pipeline_.stages().failure());
                continue;
            }
            msg::TokenEvent event;
            event.logits = client_tensor(share.n_want, pipeline_.stages().facts().vocab_size);
            std::vector<msg::Bytes> frames;
            frames.push_back(std::move(*bytes));
            there = request.client.send(std::move(event), std::move(frames));
        }
        if (!there) {
            abandon(request);
        } else if (request.prompt_done() && request.n_prompt == request.context) {
            finish(request, nullptr, msg::FinishReason::context_full);
        }
    }
}

std::vector<GenerationLoop::Turn> GenerationLoop::sample(const StepPlan& plan, Logits& logits) {
    std::vector<Turn> turns;
    std::vector<SampleJob> jobs;
    for (const Share& share : plan.shares) {
        GenerationRequest& request = *running_[share.request];
        if (!share.complete || is_done(request)) continue;
        Turn turn;
        turn.request = &request;
        turn.want = share.first_want + share.n_want - 1;
        jobs.push_back({turn.want, sample_row_of(request)});
        turns.push_back(std::move(turn));
    }
    auto sampled = pipeline_.sample(logits, std::move(jobs));
    if (!pipeline_.stages().ready()) return {};
    std::vector<Turn> out;
    for (std::size_t i = 0; i < turns.size(); ++i) {
        if (!sampled[i].has_value()) {
            fail(*turns[i].request, {sampled[i].error(), pipeline_.stages().sampler().name});
            continue;
        }
        Turn& turn = turns[i];
        turn.sampled = std::move(*sampled[i]);
        turn.request->ids.push_back(turn.sampled.id);
        turn.reason =
            turn.sampled.is_stop ? msg::FinishReason::stop_id : limit_reached(*turn.request);
        ++generated_tokens_;
        out.push_back(std::move(turn));
    }
    return out;
}

void GenerationLoop::decode(std::vector<Turn>& turns) {
    std::vector<msg::Decode> pieces;
    for (const Turn& turn : turns) {
        msg::Decode piece;
        if (turn.reason != msg::FinishReason::stop_id) piece.ids = {turn.sampled.id};
        piece.pending = turn.request->pending;
        piece.final = turn.reason.has_value();
        piece.skip_specials = turn.request->submit.skip_specials;
        pieces.push_back(std::move(piece));
    }
    auto decoded = pipeline_.decode(std::move(pieces));
    if (!pipeline_.stages().ready()) return;
    for (std::size_t i = 0; i < turns.size(); ++i) {
        if (decoded[i].has_value()) {
            add_text(turns[i], std::move(*decoded[i]));
        } else {
            fail(*turns[i].request, {decoded[i].error(), pipeline_.stages().tokenizer().name});
        }
    }
}

void GenerationLoop::add_text(Turn& turn, msg::Decoded decoded) {
    GenerationRequest& request = *turn.request;
    request.pending = std::move(decoded.pending);
    StopStrings::Output output = request.stop_strings.push(decoded.text);
    turn.text = std::move(output.text);
    if (output.matched.has_value()) {
        turn.reason = msg::FinishReason::stop_string;
        turn.stop_string = std::move(*output.matched);
    } else if (turn.reason.has_value()) {
        turn.text += request.stop_strings.flush();
    }
}

void GenerationLoop::send_token(Turn& turn, Logits& logits) {
    GenerationRequest& request = *turn.request;
    if (is_done(request)) return;
    msg::TokenEvent event;
    event.ids = {turn.sampled.id};
    event.text = std::move(turn.text);
    std::vector<msg::Bytes> frames;
    if (request.submit.want_logits != msg::WantLogits::none) {
        auto bytes = pipeline_.rows(logits, turn.want, 1);
        if (!bytes.has_value()) return fail(request, pipeline_.stages().failure());
        event.logits = client_tensor(1, pipeline_.stages().facts().vocab_size);
        frames.push_back(std::move(*bytes));
    }
    if (request.submit.n_logprobs > 0) event.logprobs.push_back(turn.sampled);
    if (!request.client.send(std::move(event), std::move(frames))) return abandon(request);
    if (turn.reason.has_value()) finish(request, &turn, *turn.reason);
}

/// The state that the trunk has now: that of every id but the last of an answer, which is fed only
/// when another one follows. A failure is told and ends nothing.
void GenerationLoop::begin_save(GenerationRequest& request) {
    if (!pipeline_.stages().ready())  // lost earlier in this step
        return end_save(request, pipeline_.stages().loss());
    const auto end = request.ids.begin() + static_cast<std::ptrdiff_t>(request.n_fed);
    auto transfer = pipeline_.begin(
        msg::SaveSession{request.session, request.submit.save_session, {request.ids.begin(), end}});
    if (!transfer.has_value()) return end_save(request, pipeline_.stages().failure());
    request.transfer = std::move(*transfer);
}

void GenerationLoop::end_save(GenerationRequest& request, std::optional<msg::Failure> failure) {
    msg::SessionSaved saved;
    saved.n_ids = static_cast<std::uint32_t>(request.n_fed);
    if (!failure.has_value()) saved.bytes = Pipeline::saved_bytes(*request.transfer);
    request.transfer.reset();
    saved.failure = std::move(failure);
    if (saved.failure.has_value()) {
        log::warn(fmt::format("session is not saved name={} reason=\"{}\"",
                              request.submit.save_session, saved.failure->error.message));
    }
    request.client.send(std::move(saved));
    send_finished(request);
}

void GenerationLoop::finish(GenerationRequest& request, const Turn* turn,
                            msg::FinishReason reason) {
    const auto now = Clock::now();
    msg::Finished& finished = request.finished;
    finished.reason = reason;
    finished.n_prompt = static_cast<std::uint32_t>(request.n_prompt);
    finished.n_generated = static_cast<std::uint32_t>(request.n_generated());
    if (turn != nullptr && reason == msg::FinishReason::stop_id)
        finished.stop_id = turn->sampled.id;
    if (turn != nullptr) finished.stop_string = turn->stop_string;
    const auto prefill_end = request.prompt_done() ? request.decode_started : now;
    finished.prefill_ns = ns_between(request.prefill_started, prefill_end);
    finished.decode_ns = ns_between(prefill_end, now);
    if (!request.submit.save_session.empty() && reason != msg::FinishReason::cancelled)
        begin_save(request);
    else
        send_finished(request);
}

void GenerationLoop::send_finished(GenerationRequest& request) {
    const msg::FinishReason reason = request.finished.reason;
    log::debug(fmt::format("request ends reason={} prompt={} generated={}", msg::to_string(reason),
                           request.finished.n_prompt, request.finished.n_generated));
    request.client.send(std::move(request.finished));
    ++(reason == msg::FinishReason::cancelled ? cancelled_ : finished_);
    ended_.push_back(request.handle);
}

void GenerationLoop::fail(GenerationRequest& request, const msg::Failure& failure) {
    const std::string line =
        fmt::format("request fails service={} code={} reason=\"{}\"", failure.service,
                    to_string(failure.error.code), failure.error.message);
    if (pipeline_.stages().interrupted())
        log::info(line);
    else
        log::warn(line);
    request.client.send_failure(failure);
    ++failed_;
    ended_.push_back(request.handle);
}

void GenerationLoop::abandon(GenerationRequest& request) {
    log::debug("request ends reason=client-gone");
    ++clients_gone_;
    ended_.push_back(request.handle);
}

void GenerationLoop::give_back(GenerationRequest& request, msg::Failure failure) {
    const auto at = std::find_if(running_.begin(), running_.end(),
                                 [&](const RequestPtr& one) { return one.get() == &request; });
    session_used_[request.session - options_.first_session] = false;
    request.session = 0;
    returned_.push_back({std::move(*at), std::move(failure)});
}

bool GenerationLoop::has_ended(const GenerationRequest& request) const noexcept {
    return std::find(ended_.begin(), ended_.end(), request.handle) != ended_.end();
}

void GenerationLoop::remove_ended() {
    if (ended_.empty()) return;
    std::vector<std::uint64_t> sessions;
    for (const auto& request : running_) {
        if (!has_ended(*request)) continue;
        sessions.push_back(request->session);
        session_used_[request->session - options_.first_session] = false;
    }
    std::erase_if(running_, [this](const RequestPtr& r) { return has_ended(*r); });
    ended_.clear();
    pipeline_.stages().drop_sessions(sessions);
}

}  // namespace k3::gateway
