#include "services/trunk/service.h"

#include <algorithm>
#include <chrono>
#include <utility>

#include "common/base/deadline.h"
#include "common/base/log.h"
#include "common/transport/tensor_io.h"

namespace k3::trunk {

namespace {

void add(std::atomic<std::uint64_t>& counter, std::uint64_t n) {
    counter.fetch_add(n, std::memory_order_relaxed);
}

std::uint64_t ns_since(Clock::time_point begin) {
    return static_cast<std::uint64_t>(
        std::chrono::duration_cast<std::chrono::nanoseconds>(Clock::now() - begin).count());
}

}  // namespace

Service::Service(Stage& stage, SessionTable& sessions, const SessionDirectory& saved,
                 const ExpertBackend& experts, transport::Arena* arena, std::uint32_t max_sessions,
                 telemetry::Counters& counters)
    : stage_(stage),
      sessions_(sessions),
      saved_(saved),
      experts_(experts),
      arena_(arena),
      max_sessions_(max_sessions),
      n_steps_(counters.add("steps")),
      n_rows_(counters.add("step_rows")),
      n_logit_rows_(counters.add("logit_rows")),
      n_refused_(counters.add("refused_requests")),
      n_failed_(counters.add("failed_steps")),
      step_ns_(counters.add("step_ns")),
      expert_wait_ns_(counters.add("expert_wait_ns")),
      in_bytes_(counters.add("step_in_bytes")),
      out_bytes_(counters.add("step_out_bytes")),
      n_sessions_(counters.add("open_sessions")),
      session_bytes_(counters.add("session_bytes")),
      n_saved_(counters.add("saved_sessions")),
      n_loaded_(counters.add("loaded_sessions")),
      loaded_positions_(counters.add("loaded_positions")) {}

msg::TrunkFacts Service::facts() const noexcept {
    const model::ModelConfig& config = stage_.config();
    msg::TrunkFacts facts;
    facts.first_layer = stage_.range().first;
    facts.n_layers = stage_.range().count;
    facts.total_layers = config.n_layers;
    facts.hidden_size = config.hidden_size;
    facts.vocab_size = config.vocab_size;
    facts.max_positions = config.max_positions;
    facts.max_step_rows = static_cast<std::uint32_t>(stage_.max_step_rows());
    facts.max_sessions = max_sessions_;
    facts.in_vectors = stage_.in_vectors();
    facts.out_vectors = stage_.out_vectors();
    facts.mla_bf16 = config.mla.cache == model::MlaCache::bf16;
    return facts;
}

void Service::handle(transport::Request request) {
    std::vector<msg::Bytes> out;
    has_run_ = false;
    Result<msg::Body> result = answer(request.envelope.body, request.frames, out);
    count_sessions();
    if (result.has_value()) {
        request.responder.send(std::move(result).value(), std::move(out));
        return;
    }
    // A step that reached the layers failed for a reason of this pipeline; anything else was asked
    // for wrongly, which is the caller's to report.
    add(has_run_ ? n_failed_ : n_refused_, 1);
    if (has_run_) log::error("step failed: " + result.error().sentence());
    msg::Failure failure{std::move(result).error(), has_run_ ? experts_.failed_service() : ""};
    if (failure.service.empty())
        request.responder.send_error(failure.error);
    else
        request.responder.send_failure(std::move(failure));
}

Result<msg::Body> Service::answer(const msg::Body& body, std::vector<msg::Bytes>& in,
                                  std::vector<msg::Bytes>& out) {
    if (const auto* open = std::get_if<msg::OpenSession>(&body)) {
        if (!open->save_as.empty()) RETURN_IF_ERROR(saved_.check_save(open->save_as));
        ASSIGN_OR_RETURN(const Session* session,
                         sessions_.open(open->session, open->max_positions));
        static_cast<void>(session);
        return msg::Body(msg::Done{});
    }
    if (const auto* fork = std::get_if<msg::ForkSession>(&body)) {
        RETURN_IF_ERROR(sessions_.fork(fork->source, fork->target, fork->max_positions));
        return msg::Body(msg::Done{});
    }
    if (const auto* drop = std::get_if<msg::DropSession>(&body)) {
        sessions_.drop(drop->session);
        return msg::Body(msg::Done{});
    }
    if (const auto* asked = std::get_if<msg::SaveSession>(&body)) {
        ASSIGN_OR_RETURN(const msg::SavedSession result, save(*asked));
        return msg::Body(result);
    }
    if (const auto* asked = std::get_if<msg::LoadSession>(&body)) {
        ASSIGN_OR_RETURN(const msg::LoadedSession result, load(*asked));
        return msg::Body(result);
    }
    if (const auto* asked = std::get_if<msg::Step>(&body)) {
        ASSIGN_OR_RETURN(msg::StepResult result, step(*asked, in, out));
        return msg::Body(std::move(result));
    }
    return Error{ErrorCode::unsupported,
                 "a trunk stage has no answer to " + std::string(msg::name_of(body)),
                 "check that the endpoint belongs to the right service"};
}

Result<msg::StepResult> Service::step(const msg::Step& step, std::vector<msg::Bytes>& in,
                                      std::vector<msg::Bytes>& out) {
    const Clock::time_point begin = Clock::now();
    RETURN_IF_ERROR(request_.read(step, in, reader_, stage_, sessions_));
    const StepInput input = request_.input();
    has_run_ = true;
    Result<std::span<const float>> values = stage_.step(input);
    add(expert_wait_ns_, stage_.expert_wait_ns());
    add(step_ns_, ns_since(begin));
    if (!values.has_value()) return std::move(values).error();

    const model::ModelConfig& config = stage_.config();
    const bool is_last = stage_.range().is_last(config);
    msg::StepResult result;
    if (!values->empty()) {
        std::vector<std::uint64_t> shape = {input.rows.size(), stage_.out_vectors(),
                                            config.hidden_size};
        if (is_last) shape = {input.wanted.size(), config.vocab_size};
        result.output = transport::put_tensor(msg::DType::f32, std::move(shape),
                                              std::as_bytes(*values), arena_, step.reply_shm, out);
    }
    result.compute_ns = ns_since(begin);
    result.expert_wait_ns = stage_.expert_wait_ns();
    add(n_steps_, 1);
    add(n_rows_, input.rows.size());
    if (is_last) add(n_logit_rows_, input.wanted.size());
    add(in_bytes_, input.hidden.size_bytes());
    add(out_bytes_, values->size_bytes());
    return result;
}

Result<msg::SavedSession> Service::save(const msg::SaveSession& save) {
    const Clock::time_point begin = Clock::now();
    ASSIGN_OR_RETURN(Session * session, sessions_.find(save.session));
    ASSIGN_OR_RETURN(const std::uint64_t bytes, saved_.save(save.name, save.ids, *session));
    add(n_saved_, 1);
    log::info("saved session name=" + save.name + " positions=" + std::to_string(save.ids.size()) +
              " bytes=" + std::to_string(bytes) +
              " ms=" + std::to_string(ns_since(begin) / 1'000'000));
    return msg::SavedSession{bytes};
}

/// The file is judged before the session is opened, and the session is reserved before the state is
/// read: what is refused costs nothing.
Result<msg::LoadedSession> Service::load(const msg::LoadSession& load) {
    const Clock::time_point begin = Clock::now();
    if (!load.save_as.empty()) RETURN_IF_ERROR(saved_.check_save(load.save_as));
    ASSIGN_OR_RETURN(const SessionFile file, saved_.open(load.name));
    const std::span<const std::uint32_t> ids = file.ids();
    const auto agreed = std::mismatch(ids.begin(), ids.end(), load.ids.begin(), load.ids.end());
    msg::LoadedSession result;
    result.n_ids = ids.size();
    result.n_agreed = static_cast<std::uint64_t>(agreed.first - ids.begin());
    const bool is_prefix = agreed.first == ids.end() && ids.size() < load.ids.size();
    if (is_prefix && load.max_positions < ids.size())
        return Error{ErrorCode::invalid_argument,
                     "session " + std::to_string(load.session) + " was asked to hold " +
                         std::to_string(load.max_positions) + " positions, but '" + load.name +
                         "' has " + std::to_string(ids.size()),
                     "ask for more positions"};
    ASSIGN_OR_RETURN(Session * session, sessions_.open(load.session, load.max_positions));
    if (!is_prefix) return result;
    if (Status filled = file.read_into(*session); !filled.has_value()) {
        sessions_.drop(load.session);
        return std::move(filled).error();
    }
    result.position = session->position();
    add(n_loaded_, 1);
    add(loaded_positions_, result.position);
    log::info("loaded session name=" + load.name + " positions=" + std::to_string(ids.size()) +
              " ms=" + std::to_string(ns_since(begin) / 1'000'000));
    return result;
}

void Service::count_sessions() noexcept {
    n_sessions_.store(sessions_.size(), std::memory_order_relaxed);
    session_bytes_.store(sessions_.used_bytes(), std::memory_order_relaxed);
}

}  // namespace k3::trunk
