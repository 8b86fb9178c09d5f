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
      loaded_positions_(counters.add("loaded_positions")),
      jobs_(sessions) {}

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
    tend();
    msg::Body& body = request.envelope.body;
    if (auto* save = std::get_if<msg::SaveSession>(&body)) {
        const Status started = start_save(std::move(*save), request.responder);
        if (!started.has_value()) refuse(request.responder, started.error());
        return;
    }
    if (auto* load = std::get_if<msg::LoadSession>(&body)) {
        const Status started = start_load(std::move(*load), request.responder);
        if (!started.has_value()) refuse(request.responder, started.error());
        count_sessions();
        return;
    }
    std::vector<msg::Bytes> out;
    has_run_ = false;
    Result<msg::Body> result = answer(body, request.frames, out);
    count_sessions();
    if (result.has_value())
        request.responder.send(std::move(result).value(), std::move(out));
    else
        refuse(request.responder, std::move(result).error());
}

void Service::tend() {
    jobs_.collect();
    count_sessions();
}

/// A step that reached the layers failed for a reason of this pipeline; anything else was asked
/// for wrongly, which is the caller's to report.
void Service::refuse(const transport::Responder& responder, Error error) {
    add(has_run_ ? n_failed_ : n_refused_, 1);
    if (has_run_) log::error("step failed: " + error.sentence());
    msg::Failure failure{std::move(error), has_run_ ? experts_.failed_service() : ""};
    if (failure.service.empty())
        responder.send_error(failure.error);
    else
        responder.send_failure(std::move(failure));
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

Status Service::start_save(msg::SaveSession save, const transport::Responder& responder) {
    has_run_ = false;
    ASSIGN_OR_RETURN(Session * session, sessions_.find(save.session));
    const std::uint64_t id = save.session;
    jobs_.start(SessionJobs::Kind::save, id, responder,
                [this, session, save = std::move(save)](const GiveUp& give_up) {
                    auto result = this->save(save, *session, give_up);
                    if (!result.has_value()) add(n_refused_, 1);
                    return result;
                });
    return Status::ok();
}

/// The session is reserved here, where sessions are counted; everything that touches the disk waits
/// for its turn.
Status Service::start_load(msg::LoadSession load, const transport::Responder& responder) {
    has_run_ = false;
    ASSIGN_OR_RETURN(Session * session, sessions_.open(load.session, load.max_positions));
    const std::uint64_t id = load.session;
    jobs_.start(SessionJobs::Kind::load, id, responder,
                [this, session, load = std::move(load)](const GiveUp& give_up) {
                    auto result = this->load(load, *session, give_up);
                    if (!result.has_value()) add(n_refused_, 1);
                    return result;
                });
    return Status::ok();
}

Result<msg::Body> Service::save(const msg::SaveSession& save, Session& session,
                                const GiveUp& give_up) {
    const Clock::time_point begin = Clock::now();
    ASSIGN_OR_RETURN(const std::uint64_t bytes, saved_.save(save.name, save.ids, session, give_up));
    add(n_saved_, 1);
    log::info("saved session name=" + save.name + " positions=" + std::to_string(save.ids.size()) +
              " bytes=" + std::to_string(bytes) +
              " ms=" + std::to_string(ns_since(begin) / 1'000'000));
    return msg::Body(msg::SavedSession{bytes});
}

Result<msg::Body> Service::load(const msg::LoadSession& load, Session& session,
                                const GiveUp& give_up) {
    const Clock::time_point begin = Clock::now();
    if (!load.save_as.empty()) RETURN_IF_ERROR(saved_.check_save(load.save_as));
    ASSIGN_OR_RETURN(const SessionFile file, saved_.open(load.name));
    const std::span<const std::uint32_t> ids = file.ids();
    const auto agreed = std::mismatch(ids.begin(), ids.end(), load.ids.begin(), load.ids.end());
    msg::LoadedSession result;
    result.n_ids = ids.size();
    result.n_agreed = static_cast<std::uint64_t>(agreed.first - ids.begin());
    const bool is_prefix = agreed.first == ids.end() && ids.size() < load.ids.size();
    if (!is_prefix) return msg::Body(result);
    if (load.max_positions < ids.size())
        return Error{ErrorCode::invalid_argument,
                     "session " + std::to_string(load.session) + " was asked to hold " +
                         std::to_string(load.max_positions) + " positions, but '" + load.name +
                         "' has " + std::to_string(ids.size()),
                     "ask for more positions"};
    RETURN_IF_ERROR(file.read_into(session, give_up));
    result.position = session.position();
    add(n_loaded_, 1);
    add(loaded_positions_, result.position);
    log::info("loaded session name=" + load.name + " positions=" + std::to_string(ids.size()) +
              " ms=" + std::to_string(ns_since(begin) / 1'000'000));
    return msg::Body(result);
}

void Service::count_sessions() noexcept {
    n_sessions_.store(sessions_.size(), std::memory_order_relaxed);
    session_bytes_.store(sessions_.used_bytes(), std::memory_order_relaxed);
}

}  // namespace k3::trunk
