#include "launcher/watcher.h"

#include <fmt/format.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cstring>
#include <utility>

#include "common/transport/channel.h"
#include "launcher/endpoint_probe.h"

namespace k3::launcher {

namespace {

constexpr std::int64_t kKnockMs = 500;  // for one connection; the thread cannot end meanwhile

/// Looks whether anybody is at an attached endpoint before it is spoken to.
class Door {
  public:
    explicit Door(const Watcher::Options& options) : options_(options) {}

    /// True from the first accepted connection on.
    bool open() {
        if (open_ || !options_.attached) return true;
        EndpointProbe probe = probe_endpoint(options_.endpoint, kKnockMs);
        open_ = probe.finding == EndpointProbe::Finding::listening;
        if (probe.finding != EndpointProbe::Finding::absent) {
            absent_since_.reset();
        } else if (!absent_since_.has_value()) {
            absent_since_ = Clock::now();
        }
        reason_ = std::move(probe.reason);
        return open_;
    }

    /// The error, once it has been closed for too long.
    std::optional<Error> refusal() const {
        if (!absent_since_.has_value() ||
            Clock::now() - *absent_since_ < std::chrono::milliseconds(options_.absence_ms))
            return std::nullopt;
        return Error{ErrorCode::unavailable,
                     fmt::format("nothing answers at {}, the endpoint of {}: {}", options_.endpoint,
                                 options_.name, reason_),
                     "start that process first, or remove the endpoint from the pipeline file"};
    }

  private:
    const Watcher::Options& options_;
    bool open_ = false;
    std::optional<Clock::time_point> absent_since_;
    std::string reason_;
};

/// One stage through one channel: remembers which instance it has already been introduced to.
class Interview {
  public:
    Interview(transport::Channel& channel, std::size_t stage) : channel_(channel), stage_(stage) {}

    Sighting ask(std::int64_t ask_ms) {
        Sighting sighting;
        sighting.stage = stage_;
        auto pong = channel_.ping(Deadline::after_ms(ask_ms));
        if (!pong.has_value()) {
            // Another protocol version or a failure it reports will not change by waiting.
            ErrorCode code = pong.error().code;
            if (code != ErrorCode::unavailable && code != ErrorCode::deadline_exceeded)
                sighting.refusal = std::move(pong).error();
            return sighting;
        }
        sighting.answered = true;
        sighting.pong = *std::move(pong);
        if (sighting.pong.state == msg::State::ready && sighting.pong.instance != introduced_)
            introduce(sighting);
        return sighting;
    }

  private:
    void introduce(Sighting& sighting) {
        auto announcement = channel_.hello({}, Deadline::after_ms(1000));
        if (announcement.has_value()) {
            introduced_ = announcement->instance;
            sighting.announcement = *std::move(announcement);
            return;
        }
        ErrorCode code = announcement.error().code;
        if (code == ErrorCode::incompatible || code == ErrorCode::unsupported ||
            code == ErrorCode::invalid_argument)
            sighting.refusal = std::move(announcement).error();
        else
            sighting.answered = false;  // it went away between the two questions
    }

    transport::Channel& channel_;
    std::size_t stage_;
    std::uint64_t introduced_ = 0;
};

}  // namespace

Result<std::unique_ptr<Mailbox>> Mailbox::create() {
    Fd event(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
    if (!event.valid())
        return Error{ErrorCode::io, fmt::format("cannot make an eventfd: {}", std::strerror(errno)),
                     "raise the limit of open files (ulimit -n)"};
    return std::unique_ptr<Mailbox>(new Mailbox(std::move(event)));
}

void Mailbox::put(Sighting sighting) {
    {
        std::lock_guard lock(mutex_);
        // A stage has at most one unread sighting without an introduction: the newest counts.
        for (Sighting& waiting : sightings_)
            if (waiting.stage == sighting.stage && !waiting.announcement && !waiting.refusal) {
                waiting = std::move(sighting);
                ring();
                return;
            }
        sightings_.push_back(std::move(sighting));
    }
    ring();
}

std::optional<Sighting> Mailbox::take() {
    std::lock_guard lock(mutex_);
    if (sightings_.empty()) return std::nullopt;
    Sighting sighting = std::move(sightings_.front());
    sightings_.pop_front();
    return sighting;
}

void Mailbox::ring() noexcept {
    std::uint64_t one = 1;
    [[maybe_unused]] ssize_t sent = ::write(event_.get(), &one, sizeof one);
}

void Mailbox::silence() noexcept {
    std::uint64_t count = 0;
    [[maybe_unused]] ssize_t got = ::read(event_.get(), &count, sizeof count);
}

Result<std::unique_ptr<Watcher>> Watcher::start(Options options, Mailbox& mailbox) {
    // The channel is made on the thread that uses it; here only its endpoint is judged.
    transport::Channel::Options probe;
    probe.endpoint = options.endpoint;
    probe.peer = options.name;
    ASSIGN_OR_RETURN([[maybe_unused]] auto checked, transport::Channel::create(probe));
    std::unique_ptr<Watcher> watcher(new Watcher());
    watcher->options_ = std::move(options);
    watcher->mailbox_ = &mailbox;
    watcher->thread_ = std::thread([self = watcher.get()] { self->run(); });
    return watcher;
}

Watcher::~Watcher() {
    ask_stop();
    if (thread_.joinable()) thread_.join();
}

void Watcher::hurry() noexcept {
    std::lock_guard lock(mutex_);
    hurry_ = true;
    wake_.notify_all();
}

void Watcher::ask_stop() noexcept {
    std::lock_guard lock(mutex_);
    stop_ = true;
    wake_.notify_all();
}

void Watcher::run() {
    transport::Channel::Options options;
    options.endpoint = options_.endpoint;
    options.peer = options_.name;
    options.run_id = options_.run_id;
    options.keys = options_.keys;
    auto channel = transport::Channel::create(std::move(options));
    if (!channel.has_value()) return;  // start() has just made one like it
    Interview interview(**channel, options_.stage);
    Door door(options_);
    for (;;) {
        Sighting sighting;
        if (door.open()) {
            sighting = interview.ask(options_.ask_ms);
        } else {
            sighting.stage = options_.stage;
            sighting.refusal = door.refusal();
        }
        bool steady = sighting.answered && sighting.pong.state == msg::State::ready;
        mailbox_->put(std::move(sighting));
        std::unique_lock lock(mutex_);
        if (stop_) return;
        auto pause = std::chrono::milliseconds(steady ? options_.steady_ms : options_.eager_ms);
        wake_.wait_for(lock, pause, [this] { return stop_ || hurry_; });
        hurry_ = false;
        if (stop_) return;
    }
}

}  // namespace k3::launcher
