#pragma once
// Asking one stage again and again how it is, on a thread of its own.
//
// A question to a process that is not there waits for its deadline; with one thread for all stages
// a slow one would hide the others. What is seen goes into a mailbox that the supervisor polls
// together with everything else it waits for.

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>

#include "common/base/fd.h"
#include "common/base/result.h"
#include "common/transport/curve_keys.h"
#include "common/transport/messages/control.h"

namespace k3::launcher {

/// What one question brought.
struct Sighting {
    std::size_t stage = 0;
    bool answered = false;
    msg::Pong pong;                                 // if answered
    std::optional<msg::Announcement> announcement;  // the first time an instance says ready
    // It answers and what it says cannot be worked with, or it is attached and nobody is there.
    std::optional<Error> refusal;
};

/// Sightings of all watchers on their way to the supervisor.
class Mailbox {
  public:
    /// Error: io.
    static Result<std::unique_ptr<Mailbox>> create();
    void put(Sighting sighting);
    std::optional<Sighting> take();
    /// Readable while something may be in it.
    int fd() const noexcept { return event_.get(); }
    /// Makes fd() readable without putting anything in.
    void ring() noexcept;
    /// Called by the supervisor before it takes everything.
    void silence() noexcept;

  private:
    explicit Mailbox(Fd event) : event_(std::move(event)) {}
    Fd event_;
    std::mutex mutex_;
    std::deque<Sighting> sightings_;
};

class Watcher {
  public:
    struct Options {
        std::size_t stage = 0;
        std::string name;
        std::string endpoint;
        std::uint64_t run_id = 0;
        std::shared_ptr<const transport::CurveKeys> keys;  // null: none; shared by all watchers
        bool attached = false;         // not started by us: refused if nobody listens there
        std::int64_t ask_ms = 150;     // how long one question waits
        std::int64_t eager_ms = 10;    // pause between questions until it is ready
        std::int64_t steady_ms = 500;  // and afterwards
        // Nobody has to listen at an attached endpoint for so long: one script may start both.
        std::int64_t absence_ms = 700;
    };
    /// Starts the thread. `mailbox` must outlive this. Error: invalid_argument (endpoint).
    static Result<std::unique_ptr<Watcher>> start(Options options, Mailbox& mailbox);
    ~Watcher();
    Watcher(const Watcher&) = delete;
    Watcher& operator=(const Watcher&) = delete;

    /// Asks eagerly again: the process was restarted. Any thread.
    void hurry() noexcept;
    /// Tells the thread to end without waiting for it; the destructor waits.
    void ask_stop() noexcept;

  private:
    Watcher() = default;
    void run();
    Options options_;
    Mailbox* mailbox_ = nullptr;
    std::mutex mutex_;
    std::condition_variable wake_;
    bool stop_ = false;
    bool hurry_ = false;
    std::thread thread_;
};

}  // namespace k3::launcher
