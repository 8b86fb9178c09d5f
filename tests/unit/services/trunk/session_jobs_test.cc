// Sessions that are lent to the thread that saves and loads them.

#include "services/trunk/session_jobs.h"

#include <doctest/doctest.h>

#include <chrono>
#include <condition_variable>
#include <functional>
#include <mutex>
#include <string>
#include <thread>

#include "tests/support/text.h"
#include "tests/unit/services/trunk/harness.h"

namespace k3::test {

namespace {

using trunk::SessionJobs;

/// Work that waits until it is let go.
class Gate {
  public:
    void open() { set(&is_open_); }
    void wait_until_entered() {
        std::unique_lock lock(mutex_);
        changed_.wait(lock, [this] { return is_entered_; });
    }
    SessionJobs::Work work(Result<msg::Body> result) {
        return [this, result](const std::function<bool()>& give_up) -> Result<msg::Body> {
            set(&is_entered_);
            std::unique_lock lock(mutex_);
            while (!is_open_) {
                if (give_up()) return Error{ErrorCode::cancelled, "given up", ""};
                changed_.wait_for(lock, std::chrono::milliseconds(1));
            }
            return result;
        };
    }

  private:
    void set(bool* what) {
        const std::lock_guard lock(mutex_);
        *what = true;
        changed_.notify_all();
    }
    std::mutex mutex_;
    std::condition_variable changed_;
    bool is_open_ = false;
    bool is_entered_ = false;
};

struct JobsRig {
    trunk::SessionTable sessions{tiny_model().config,
                                 {0, 13},
                                 1,
                                 {4, std::uint64_t{1} << 20U, tiny_model().config.max_positions}};
    Gate gate;
    SessionJobs jobs{sessions};

    void start(SessionJobs::Kind kind, std::uint64_t id, Result<msg::Body> result) {
        jobs.start(kind, id, {}, gate.work(std::move(result)));
        gate.wait_until_entered();
    }
    /// Until the thread has given everything back.
    bool comes_back(std::uint64_t id) {
        for (int i = 0; i < 20000; ++i) {
            jobs.collect();
            if (sessions.find(id).has_value()) return true;
            std::this_thread::sleep_for(std::chrono::milliseconds(1));
        }
        return false;
    }
    bool gives_back(std::uint64_t bytes) {
        for (int i = 0; i < 20000 && sessions.used_bytes() != bytes; ++i) {
            jobs.collect();
            std::this_thread::sleep_for(std::chrono::milliseconds(1));
        }
        return sessions.used_bytes() == bytes;
    }
};

const Error kBroken{ErrorCode::corrupt, "broken", ""};

}  // namespace

TEST_CASE("a session that is being saved is refused to others and comes back as it was") {
    JobsRig f;
    REQUIRE(f.sessions.open(1, 8).has_value());
    REQUIRE(f.sessions.open(2, 8).has_value());
    f.start(SessionJobs::Kind::save, 1, kBroken);  // a save that fails costs the session nothing
    f.jobs.collect();
    const Error error = f.sessions.find(1).error();
    CHECK(error.code == ErrorCode::unavailable);
    CHECK(contains(error.message, "session 1 is being saved"));
    CHECK(f.sessions.fork(1, 3, 8).error().code == ErrorCode::unavailable);
    CHECK(f.sessions.find(2).has_value());
    CHECK(f.sessions.open(3, 8).has_value());
    f.gate.open();
    CHECK(f.comes_back(1));
}

TEST_CASE("a session dropped while it is saved keeps its memory until then, not its number") {
    JobsRig f;
    REQUIRE(f.sessions.open(1, 8).has_value());
    const std::uint64_t one = f.sessions.used_bytes();
    f.start(SessionJobs::Kind::save, 1, msg::Body(msg::Done{}));
    f.sessions.drop(1);
    CHECK(f.sessions.used_bytes() == one);
    REQUIRE(f.sessions.open(1, 8).has_value());
    CHECK(f.sessions.used_bytes() == 2 * one);
    f.gate.open();
    CHECK(f.gives_back(one));
    CHECK(f.sessions.find(1).has_value());
}

TEST_CASE("a session whose load fails is gone, and one that is dropped ends its load") {
    JobsRig f;
    SUBCASE("it fails") {
        REQUIRE(f.sessions.open(1, 8).has_value());
        f.start(SessionJobs::Kind::load, 1, kBroken);
        f.gate.open();
    }
    SUBCASE("it is dropped") {
        REQUIRE(f.sessions.open(1, 8).has_value());
        f.start(SessionJobs::Kind::load, 1, msg::Body(msg::Done{}));
        f.sessions.drop(1);  // the gate stays shut
    }
    CHECK(f.gives_back(0));
    CHECK(f.sessions.find(1).error().code == ErrorCode::not_found);
}

TEST_CASE("the end does not wait for what is saved") {
    JobsRig f;
    REQUIRE(f.sessions.open(1, 8).has_value());
    REQUIRE(f.sessions.open(2, 8).has_value());
    f.start(SessionJobs::Kind::save, 1, msg::Body(msg::Done{}));
    f.jobs.start(SessionJobs::Kind::save, 2, {}, f.gate.work(msg::Body(msg::Done{})));
    // The gate stays shut: the destructors end both.
}

}  // namespace k3::test
