#include "services/trunk/session_jobs.h"

#include <utility>

namespace k3::trunk {

SessionJobs::SessionJobs(SessionTable& sessions)
    : sessions_(sessions), thread_([this] { run(); }) {}

SessionJobs::~SessionJobs() {
    {
        const std::lock_guard lock(mutex_);
        stopping_ = true;
        waiting_.clear();
    }
    changed_.notify_all();
    thread_.join();
}

void SessionJobs::start(Kind kind, std::uint64_t id, transport::Responder responder, Work work) {
    auto job = std::make_unique<Job>();
    job->kind = kind;
    job->session = &sessions_.lend(id, kind == Kind::save ? "is being saved" : "is being loaded");
    job->responder = std::move(responder);
    job->work = std::move(work);
    {
        const std::lock_guard lock(mutex_);
        waiting_.push_back(std::move(job));
    }
    changed_.notify_all();
}

void SessionJobs::collect() {
    std::vector<std::unique_ptr<Job>> ended;
    {
        const std::lock_guard lock(mutex_);
        ended.swap(ended_);
    }
    for (const std::unique_ptr<Job>& job : ended)
        sessions_.take_back(*job->session, job->kind == Kind::load && job->failed);
}

void SessionJobs::run() {
    std::unique_lock lock(mutex_);
    while (true) {
        changed_.wait(lock, [this] { return stopping_ || !waiting_.empty(); });
        if (stopping_) return;
        std::unique_ptr<Job> job = std::move(waiting_.front());
        waiting_.pop_front();
        lock.unlock();
        const bool is_load = job->kind == Kind::load;
        Result<msg::Body> result = job->work(
            [this, is_load, &job] { return stopping_ || (is_load && job->session->is_dropped()); });
        job->failed = !result.has_value();
        const transport::Responder responder = job->responder;
        lock.lock();
        // First the session, then the answer: whoever has the answer may use the session.
        ended_.push_back(std::move(job));
        lock.unlock();
        if (result.has_value())
            responder.send(std::move(result).value());
        else
            responder.send_error(result.error());
        lock.lock();
    }
}

}  // namespace k3::trunk
