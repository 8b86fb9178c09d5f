#include "services/gateway/service.h"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <utility>
#include <variant>

#include "common/base/hash.h"
#include "common/base/log.h"

namespace k3::gateway {

namespace {

constexpr std::int64_t kIdleMs = 1000;   // between signs of life of the stages
constexpr std::int64_t kMissingMs = 20;  // between looks for a missing stage
constexpr std::int64_t kTransferMs = 4;  // between looks at sessions that are saved or loaded

}  // namespace

Result<std::unique_ptr<Service>> Service::create(Options options, transport::Server& server,
                                                 telemetry::Counters& counters) {
    options.stages.first_session = first_session(server.endpoint(), options.stages.run_id);
    options.stages.n_sessions = options.max_requests;
    options.stages.interrupted = [&server] { return server.stopping(); };
    ASSIGN_OR_RETURN(auto stages, Stages::create(options.stages));
    return std::unique_ptr<Service>(
        new Service(std::move(options), server, counters, std::move(stages)));
}

Service::Service(Options options, transport::Server& server, telemetry::Counters& counters,
                 std::unique_ptr<Stages> stages)
    : options_(std::move(options)),
      server_(server),
      submitted_(counters.add("submitted_requests")),
      refused_(counters.add("refused_requests")),
      stages_(std::move(stages)),
      pipeline_(options_.pipeline, *stages_),
      loop_({options_.max_requests, options_.prefill_chunk, options_.stages.first_session},
            pipeline_, counters),
      missing_since_(Clock::now()) {}

Status Service::connect() {
    while (!server_.stopping()) {
        Status status = stages_->tend();
        if (status.has_value()) {
            const PipelineFacts& facts = stages_->facts();
            msg::Announcement announcement;
            announcement.fingerprint = facts.fingerprint;
            announcement.facts =
                msg::GatewayFacts{options_.model_name, facts.max_positions, facts.vocab_size,
                                  options_.max_requests, facts.mla_bf16};
            server_.set_ready(std::move(announcement));
            return Status::ok();
        }
        if (status.error().code == ErrorCode::incompatible) return status;
        server_.set_progress(stages_->progress_permille(),
                             "waiting for a stage: " + status.error().message);
        (void)server_.next(Deadline::after_ms(kMissingMs));  // while loading nothing is queued
    }
    return Status::ok();
}

void Service::run() {
    while (!server_.stopping()) {
        take_messages();
        tend_stages();
        accept_queued();
        start_queued();
        expire_queued();
        loop_.step();
        take_returned();
        if (!stages_->ready()) loop_.fail_all(stages_->loss());
        if (!loop_.computes()) wait();
    }
    end_all({{ErrorCode::unavailable, "the gateway is stopping", "ask again when it is back"}, ""});
}

void Service::take_messages() {
    while (auto request = server_.try_next()) take(std::move(*request));
}

void Service::take(transport::Request request) {
    if (auto* body = std::get_if<msg::Submit>(&request.envelope.body)) {
        submit(request, *body);
    } else if (const auto* end = std::get_if<msg::Cancel>(&request.envelope.body)) {
        cancel(end->request);
        if (request.responder.wants_reply()) request.responder.send(msg::Done{});
    } else {
        ++refused_;
        request.responder.send_error(
            {ErrorCode::unsupported,
             fmt::format("the gateway does not answer {}", msg::name_of(request.envelope.body)),
             "send it Submit or Cancel; check which endpoint belongs to which service"});
    }
}

void Service::submit(transport::Request& request, msg::Submit& submit) {
    ++submitted_;
    if (!request.responder.wants_reply()) {  // nobody would read the tokens, or could cancel
        ++refused_;
        return;
    }
    Status status = check_submit(submit);
    const std::size_t n_known = loop_.n_running() + queue_.size();
    const std::size_t n_allowed = std::size_t{options_.max_requests} + options_.max_queue;
    if (status.has_value() && n_known >= n_allowed)
        status = Error{ErrorCode::resource_exhausted,
                       fmt::format("{} requests are running and {} are waiting; the gateway takes "
                                   "{} and {}",
                                   loop_.n_running(), queue_.size(), options_.max_requests,
                                   options_.max_queue),
                       "ask again later, or start the gateway with a larger --max-queue"};
    if (!status.has_value()) {
        ++refused_;
        request.responder.send_error(status.error());
        return;
    }
    auto entry = std::make_unique<GenerationRequest>();
    // Not guessable from another request's: a client cancels only what it started.
    // At most 2^53, so that a program that reads JSON numbers as doubles gets it right.
    entry->handle = (splitmix_finalise(server_.instance() + ++n_handles_) >> 11U) | 1U;
    entry->submit = std::move(submit);
    entry->client = request.responder;
    entry->arrived = Clock::now();
    queue_.push_back(std::move(entry));
}

void Service::cancel(std::uint64_t handle) {
    if (loop_.cancel(handle)) return;
    const auto it = std::find_if(queue_.begin(), queue_.end(),
                                 [&](const RequestPtr& r) { return r->handle == handle; });
    if (it == queue_.end()) return;
    msg::Finished finished;
    finished.reason = msg::FinishReason::cancelled;
    finished.n_prompt = static_cast<std::uint32_t>((*it)->n_prompt);
    (*it)->client.send(std::move(finished));
    queue_.erase(it);
}

void Service::tend_stages() {
    // Running requests find out by themselves.
    // Before the first request after a pause every stage is asked: a connection may have broken
    // since.
    if (!loop_.computes()) stages_->verify(loop_.idle() && !queue_.empty() ? 0 : kIdleMs);
    if (stages_->ready()) {
        missing_since_ = Clock::now();
        return;
    }
    const Status status = stages_->tend();
    if (status.has_value()) log::info("all stages are ready again");
}

/// Gives ids to queued requests that have none yet.
void Service::accept_queued() {
    for (std::size_t i = 0; i < queue_.size() && stages_->ready();) {
        if (queue_[i]->accepted || accept(*queue_[i]) || !stages_->ready()) {
            ++i;
        } else {
            queue_.erase(queue_.begin() + static_cast<std::ptrdiff_t>(i));
        }
    }
}

/// False if it got an error or its client is gone, or a stage was lost (then it stays queued).
bool Service::accept(GenerationRequest& request) {
    auto ids = pipeline_.encode(request.submit);
    if (!ids.has_value()) {
        if (stages_->ready()) {
            ++refused_;
            request.client.send_failure(stages_->failure());
        }
        return false;
    }
    const Status status = check_ids(*ids, request.submit.stop_ids, stages_->facts());
    if (!status.has_value()) {
        ++refused_;
        request.client.send_error(status.error());
        return false;
    }
    begin(request, std::move(*ids), stages_->facts());
    request.accepted = true;
    request.submit.input = {};  // the ids replace it
    return request.client.send(msg::Accepted{request.handle, request.ids});
}

void Service::start_queued() {
    while (stages_->ready() && !loop_.full() && !queue_.empty() && queue_.front()->accepted) {
        RequestPtr& request = queue_.front();
        // The trunk may have been exchanged since the request was accepted.
        Status status = check_ids(request->ids, request->submit.stop_ids, stages_->facts());
        msg::Failure failure;
        if (status.has_value()) {
            request->context = stages_->facts().max_positions;
            status = loop_.start(request);
            if (!status.has_value()) failure = stages_->failure();
        } else {
            failure.error = status.error();
        }
        if (!status.has_value()) {
            if (!stages_->ready()) return;
            // Memory for sessions comes back when one of the running requests ends.
            if (status.error().code == ErrorCode::resource_exhausted && !loop_.idle()) return;
            ++refused_;
            request->client.send_failure(failure);
        }
        queue_.pop_front();
    }
}

/// What could not be loaded is judged as if start() had refused it.
void Service::take_returned() {
    for (GenerationLoop::Returned& returned : loop_.take_returned()) {
        const bool may_fit_later =
            returned.failure.error.code == ErrorCode::resource_exhausted && !loop_.idle();
        if (may_fit_later || !stages_->ready()) {
            queue_.push_front(std::move(returned.request));
        } else {
            ++refused_;
            returned.request->client.send_failure(std::move(returned.failure));
        }
    }
}

/// Requests do not wait for a missing stage forever.
void Service::expire_queued() {
    if (stages_->ready()) return;
    const auto limit = std::chrono::milliseconds(options_.wait_ms);
    std::erase_if(queue_, [&](const RequestPtr& request) {
        if (Clock::now() < std::max(request->arrived, missing_since_) + limit) return false;
        msg::Failure failure = stages_->loss();
        failure.error.message = fmt::format("the pipeline was not ready for {} ms: {}",
                                            options_.wait_ms, failure.error.message);
        ++refused_;
        request->client.send_failure(std::move(failure));
        return true;
    });
}

void Service::wait() {
    const bool waiting = !stages_->ready() || !queue_.empty();
    const std::int64_t wait_ms = !loop_.idle() ? kTransferMs : waiting ? kMissingMs : kIdleMs;
    if (auto request = server_.next(Deadline::after_ms(wait_ms))) take(std::move(*request));
}

void Service::end_all(const msg::Failure& failure) {
    for (auto& request : queue_) request->client.send_failure(failure);
    queue_.clear();
    loop_.fail_all(failure);
}

}  // namespace k3::gateway
