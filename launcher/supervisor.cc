#include "launcher/supervisor.h"

#include <utility>

#include "launcher/supervisor_loop.h"

namespace k3::launcher {

Supervisor::Supervisor(std::unique_ptr<Loop> loop) : loop_(std::move(loop)) {}
Supervisor::~Supervisor() = default;

Result<std::unique_ptr<Supervisor>> Supervisor::create(PipelinePlan plan, SupervisorOptions options,
                                                       ProcessStarter& starter, Janitor* janitor,
                                                       const EventLog& events, OnChange on_change) {
    auto loop = std::make_unique<Loop>(std::move(plan), options, starter, janitor, events,
                                       std::move(on_change));
    RETURN_IF_ERROR(loop->prepare());
    return std::unique_ptr<Supervisor>(new Supervisor(std::move(loop)));
}

Outcome Supervisor::run() { return loop_->run(); }

Status Supervisor::wait_ready() {
    Shared& shared = loop_->shared;
    std::unique_lock lock(shared.mutex);
    shared.changed.wait(lock, [&] { return shared.ready || shared.ending; });
    if (shared.failure.has_value()) return *shared.failure;
    if (!shared.ready)
        return Error{ErrorCode::cancelled, "the pipeline was stopped before it was ready", ""};
    return Status::ok();
}

void Supervisor::request_stop() noexcept {
    loop_->shared.stop_asked = true;
    loop_->mailbox->ring();
}

bool Supervisor::stopping() const noexcept { return loop_->shared.stopping; }

}  // namespace k3::launcher
