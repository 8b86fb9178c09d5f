#pragma once
// Saving and loading beside the service loop: a thread that moves sessions between memory and disk
// while other requests are computed.
//
// Nothing is copied: a session that is being moved is lent to the thread, and requests that name it
// are refused until it is back, which is before its client has the answer. So this takes no memory
// beyond the sessions' own budget and the ids of those that wait, and jobs are no more than
// sessions.
//
// Threads: one owner calls everything; work runs on the thread of this object, one job at a time.

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "common/base/result.h"
#include "common/transport/messages/envelope.h"
#include "common/transport/server.h"
#include "services/trunk/session.h"

namespace k3::trunk {

class SessionJobs {
  public:
    /// Returns the answer. Asks its argument between two pieces of work, and gives up (`cancelled`)
    /// once that says so.
    using Work = std::function<Result<msg::Body>(const std::function<bool()>& give_up)>;

    explicit SessionJobs(SessionTable& sessions);
    /// Gives up what runs and what waits.
    ~SessionJobs();
    SessionJobs(const SessionJobs&) = delete;
    SessionJobs& operator=(const SessionJobs&) = delete;

    enum class Kind { save, load };
    /// Lends the open, idle session `id` to `work` and answers `responder` when that has ended. A
    /// session whose load fails is dropped before the answer; one whose load is under way is given
    /// up when it is dropped.
    void start(Kind kind, std::uint64_t id, transport::Responder responder, Work work);

    /// Takes back the sessions whose work has ended.
    void collect();

  private:
    struct Job {
        Kind kind = Kind::save;
        Session* session = nullptr;
        transport::Responder responder;
        Work work;
        bool failed = false;
    };
    void run();

    SessionTable& sessions_;
    std::mutex mutex_;
    std::condition_variable changed_;
    std::deque<std::unique_ptr<Job>> waiting_;
    std::vector<std::unique_ptr<Job>> ended_;
    std::atomic<bool> stopping_{false};
    std::thread thread_;
};

}  // namespace k3::trunk
