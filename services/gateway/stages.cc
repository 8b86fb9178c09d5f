#include "services/gateway/stages.h"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <optional>

#include "common/base/hash.h"
#include "common/base/log.h"

namespace k3::gateway {

namespace {

constexpr std::int64_t kLookMs = 100;       // a ping of a stage that may not be there
constexpr std::int64_t kHelloMs = 1000;     // a hello of one that has just answered a ping
constexpr std::int64_t kFirstPauseMs = 50;  // between looks, doubling
constexpr std::int64_t kLongestPauseMs = 1000;
constexpr std::int64_t kVerifyMs = 1000;  // answered by a connection thread: normally at once
constexpr std::int64_t kLateMs = 10000;   // bound of a wait that the channel's own judgement ends
constexpr std::int64_t kDropMs = 2000;    // the trunk may still be at a step that was given up
constexpr std::int64_t kSliceMs = 100;    // of a wait, between looks at what else happens
constexpr std::int64_t kOthersMs = 1000;  // of a wait, between signs of life of the other stages
constexpr std::size_t kDropBatch = 8;     // the queues in between are short

constexpr unsigned kSessionBits = 16;  // of a session's number count within this gateway

}  // namespace

std::uint64_t first_session(const std::string& endpoint, std::uint64_t run_id) noexcept {
    std::uint64_t hash = splitmix_finalise(run_id + 1);
    for (const char c : endpoint)
        hash = splitmix_finalise(hash + static_cast<unsigned char>(c) + 1);
    return (hash << kSessionBits) | 1U;
}

Stages::Stages(Options options) : options_(std::move(options)) {}

Result<std::unique_ptr<Stages>> Stages::create(Options options) {
    if (options.trunk.empty())
        return Error{ErrorCode::invalid_argument, "the pipeline has no trunk stage",
                     "give at least one --trunk ENDPOINT"};
    std::unique_ptr<Stages> stages(new Stages(std::move(options)));
    const Options& own = stages->options_;
    RETURN_IF_ERROR(stages->add("tokenizer", own.tokenizer));
    for (std::size_t i = 0; i < own.trunk.size(); ++i)
        RETURN_IF_ERROR(stages->add(own.trunk.size() == 1 ? "trunk" : fmt::format("trunk-{}", i),
                                    own.trunk[i]));
    RETURN_IF_ERROR(stages->add("sampler", own.sampler));
    return stages;
}

Status Stages::add(std::string name, const std::string& endpoint) {
    auto stage = std::make_unique<Stage>();
    stage->name = name;
    stage->missing = {ErrorCode::unavailable,
                      fmt::format("{} at {} has not answered yet", name, endpoint),
                      fmt::format("start the {}", name)};
    transport::Channel::Options options;
    options.endpoint = endpoint;
    options.peer = std::move(name);
    options.run_id = options_.run_id;
    options.keys = options_.keys;
    ASSIGN_OR_RETURN(stage->channel, transport::Channel::create(std::move(options)));
    all_.push_back(std::move(stage));
    return Status::ok();
}

Status Stages::tend() {
    if (ready_) return Status::ok();
    const Stage* missing = nullptr;
    std::size_t progress = 0;
    for (auto& stage : all_) {
        if (!stage->up && Clock::now() >= stage->look_at) look(*stage);
        if (!stage->up && missing == nullptr) missing = stage.get();
        progress += stage->up ? 1000 : stage->progress_permille;
    }
    progress_permille_ = static_cast<std::uint32_t>(progress / all_.size());
    if (missing != nullptr) return missing->missing;
    RETURN_IF_ERROR(link());
    ready_ = true;
    for (auto& stage : all_) stage->pause_ms = 0;
    verified_at_ = Clock::now();
    return Status::ok();
}

void Stages::look(Stage& stage) {
    const auto pong = stage.channel->ping(Deadline::after_ms(kLookMs));
    if (!pong.has_value()) return absent(stage, pong.error());
    stage.progress_permille = pong->progress_permille;
    if (pong->state != msg::State::ready)
        return absent(stage, {ErrorCode::unavailable,
                              fmt::format("{} at {} is {} ({} %){}{}", stage.name,
                                          stage.channel->options().endpoint,
                                          msg::to_string(pong->state), pong->progress_permille / 10,
                                          pong->detail.empty() ? "" : ": ", pong->detail),
                              "wait until it is ready, or look at its log"});
    const Status status = say_hello(stage, {});
    if (!status.has_value()) return absent(stage, status.error());
    if (stage.logged_instance == stage.announcement.instance) return;
    stage.logged_instance = stage.announcement.instance;
    log::info(fmt::format("stage is ready stage={} endpoint={}", stage.name,
                          stage.channel->options().endpoint));
}

void Stages::absent(Stage& stage, Error error) {
    stage.up = false;
    stage.missing = std::move(error);
    stage.pause_ms = std::clamp(stage.pause_ms * 2, kFirstPauseMs, kLongestPauseMs);
    stage.look_at = Clock::now() + std::chrono::milliseconds(stage.pause_ms);
    loss_ = {stage.missing, stage.name};
}

Status Stages::say_hello(Stage& stage, const std::vector<msg::SegmentProbe>& probes) {
    ASSIGN_OR_RETURN(stage.announcement,
                     stage.channel->hello(probes, Deadline::after_ms(kHelloMs)));
    if (!stage.announcement.name.empty()) stage.name = stage.announcement.name;
    const msg::SegmentProbe& arena = stage.announcement.arena;
    stage.gateway_reads = options_.use_shm && !arena.segment.empty() && reader_.can_read(arena);
    stage.up = true;
    stage.progress_permille = 1000;
    return Status::ok();
}

/// Greets `stage` and asks whether it can read what `before` answers.
Status Stages::say_hello_after(Stage& stage, const Stage* before) {
    std::vector<msg::SegmentProbe> probes;
    if (options_.use_shm && before != nullptr && !before->announcement.arena.segment.empty())
        probes.push_back(before->announcement.arena);
    Status status = say_hello(stage, probes);
    if (!status.has_value()) {
        absent(stage, status.error());
        return status;
    }
    const std::vector<bool>& answers = stage.announcement.probes;
    stage.reads_previous = !probes.empty() && answers.size() == 1 && answers.front();
    return Status::ok();
}

/// All were there a moment ago: do they fit together, and who can read whose arena?
Status Stages::link() {
    // Once more, in order: each is asked about the one before it as that is now.
    std::vector<msg::Announcement> announcements;
    RETURN_IF_ERROR(say_hello_after(tokenizer(), nullptr));
    for (std::size_t i = 0; i < n_trunk(); ++i) {
        RETURN_IF_ERROR(say_hello_after(trunk(i), i == 0 ? nullptr : &trunk(i - 1)));
        announcements.push_back(trunk(i).announcement);
    }
    RETURN_IF_ERROR(say_hello_after(sampler(), &trunk(n_trunk() - 1)));
    auto facts = check_stages(tokenizer().announcement, announcements, sampler().announcement);
    if (!facts.has_value()) {
        // Any of them may be the wrong one: all are asked again after a pause.
        for (auto& stage : all_) absent(*stage, facts.error());
        loss_ = {facts.error(), ""};
        return facts.error();
    }
    facts_ = std::move(*facts);

    // What a former life of this gateway may have left behind.
    std::vector<std::uint64_t> sessions(options_.n_sessions);
    for (std::uint32_t i = 0; i < options_.n_sessions; ++i)
        sessions[i] = options_.first_session + i;
    for (std::size_t i = 0; i < n_trunk(); ++i) {
        Status status = drop_on(trunk(i), sessions);
        if (status.has_value()) continue;
        absent(trunk(i), status.error());
        return status;
    }
    return Status::ok();
}

/// First through the connection that is there, if it is: that ends at once with the stage's
/// process, and lasts while the stage merely waits for CPU. Else by hello: a connection that broke
/// and came back is greeted again on the way.
bool Stages::alive(Stage& stage) {
    const auto call = stage.channel->send(msg::Ping{});
    const Deadline deadline = Deadline::after_ms(kLateMs);
    while (call.has_value()) {
        const auto reply = stage.channel->receive(*call, Deadline::after_ms(kSliceMs));
        if (reply.has_value()) {
            const auto* pong = std::get_if<msg::Pong>(&reply->body);
            return pong != nullptr && pong->instance == stage.announcement.instance;
        }
        const bool is_late = reply.error().code == ErrorCode::deadline_exceeded;
        if (is_late && !deadline.expired() && !interrupted()) continue;
        stage.channel->forget(*call);
        if (interrupted()) return true;  // who ends does not judge others
        break;
    }
    const auto answer = stage.channel->hello({}, Deadline::after_ms(kVerifyMs));
    return answer.has_value() && answer->instance == stage.announcement.instance;
}

void Stages::verify(std::int64_t max_age_ms, const Stage* except) {
    if (!ready_ || Clock::now() < verified_at_ + std::chrono::milliseconds(max_age_ms)) return;
    for (auto& stage : all_) {
        if (stage.get() == except || alive(*stage)) continue;
        log::warn(fmt::format("stage is lost stage={}", stage->name));
        ready_ = false;
        absent(*stage, {ErrorCode::unavailable,
                        fmt::format("{} at {} is gone or was restarted", stage->name,
                                    stage->channel->options().endpoint),
                        "ask again when it is ready; look at its log for the cause"});
    }
    verified_at_ = Clock::now();
}

Result<transport::Reply> Stages::call(Stage& stage, msg::Body body, std::vector<msg::Bytes> frames,
                                      Deadline deadline) {
    ASSIGN_OR_RETURN(const std::uint64_t call_id, send(stage, std::move(body), std::move(frames)));
    return receive(stage, call_id, deadline);
}

Result<std::uint64_t> Stages::send(Stage& stage, msg::Body body, std::vector<msg::Bytes> frames) {
    auto call_id = stage.channel->send(std::move(body), std::move(frames));
    if (!call_id.has_value()) return judge(stage, std::move(call_id).error());
    return call_id;
}

Result<transport::Reply> Stages::receive(Stage& stage, std::uint64_t call_id, Deadline deadline) {
    auto reply = wait_for(stage, call_id, deadline);
    if (!reply.has_value() && ready_) return judge(stage, std::move(reply).error());
    return reply;
}

std::optional<Result<transport::Reply>> Stages::poll(Stage& stage, LongCall& call,
                                                     std::int64_t wait_ms) {
    auto reply = stage.channel->receive(call.id, Deadline::after_ms(wait_ms));
    if (reply.has_value()) return reply;
    // As in wait_for(): a deadline is this wait's own unless the call turns out to be over.
    if (call.silence.has_value() && reply.error().code == ErrorCode::internal)
        return judge(stage, *call.silence);
    if (reply.error().code != ErrorCode::deadline_exceeded)
        return judge(stage, std::move(reply).error());
    call.silence = std::move(reply).error();
    return std::nullopt;
}

/// Waits in slices: a step may take minutes, and meanwhile this process may be asked to stop, or
/// another stage may die.
Result<transport::Reply> Stages::wait_for(Stage& stage, std::uint64_t call_id, Deadline deadline) {
    std::optional<Error> silence;
    while (true) {
        const Deadline slice = deadline.min(Deadline::after_ms(kSliceMs));
        auto reply = stage.channel->receive(call_id, slice);
        if (reply.has_value()) {
            verified_at_ = Clock::now();
            return reply;
        }
        // What looked like silence was the stage's own answer if the call is over now.
        if (silence.has_value() && reply.error().code == ErrorCode::internal) return *silence;
        if (reply.error().code != ErrorCode::deadline_exceeded || !slice.expired()) return reply;
        silence = reply.error();
        if (deadline.expired()) break;
        if (interrupted()) {
            silence = Error{ErrorCode::cancelled, "the gateway is stopping", "ask again later"};
            break;
        }
        const bool was_ready = ready_;
        verify(kOthersMs, &stage);
        if (was_ready && !ready_) {
            failure_ = loss_;
            silence = loss_.error;
            break;
        }
    }
    stage.channel->forget(call_id);
    return *silence;
}

/// Tells a refused call from a lost stage. `unavailable` alone does not say: a trunk that lives may
/// report that one of its expert servers is gone.
Error Stages::judge(Stage& stage, Error error) {
    if (error.code == ErrorCode::cancelled) {  // by this process
        failure_ = {error, ""};
        return error;
    }
    std::string service = stage.channel->failed_service();
    // The stage calls itself by the name its pipeline gave it; the channel knows only its place.
    if (service.empty() || service == stage.channel->options().peer) service = stage.name;
    const bool may_be_lost =
        error.code == ErrorCode::unavailable || error.code == ErrorCode::deadline_exceeded;
    if (may_be_lost && !alive(stage)) {
        log::warn(fmt::format("stage is lost stage={} reason=\"{}\"", stage.name, error.message));
        ready_ = false;
        absent(stage, error);
    }
    failure_ = {error, std::move(service)};
    return error;
}

Error Stages::blame(Stage& stage, Error error) {
    failure_ = {error, stage.name};
    return error;
}

void Stages::drop_sessions(std::span<const std::uint64_t> sessions) {
    const msg::Failure failure = failure_;
    for (std::size_t i = 0; i < n_trunk(); ++i) {
        if (!trunk(i).up) continue;
        const Status status = drop_on(trunk(i), sessions);
        // A gateway that ends has asked, and does not wait for a trunk in the middle of a step.
        if (!status.has_value() && !interrupted())
            log::warn(fmt::format("sessions were not dropped stage={} reason=\"{}\"", trunk(i).name,
                                  status.error().message));
    }
    failure_ = failure;
}

Status Stages::drop_on(Stage& stage, std::span<const std::uint64_t> sessions) {
    for (std::size_t begin = 0; begin < sessions.size(); begin += kDropBatch) {
        std::vector<std::uint64_t> calls;
        for (const std::uint64_t session :
             sessions.subspan(begin, std::min(kDropBatch, sessions.size() - begin))) {
            ASSIGN_OR_RETURN(const std::uint64_t call_id,
                             send(stage, msg::DropSession{session}, {}));
            calls.push_back(call_id);
        }
        const Deadline deadline = Deadline::after_ms(kDropMs);
        for (const std::uint64_t call_id : calls)
            RETURN_IF_ERROR(receive(stage, call_id, deadline));
    }
    return Status::ok();
}

}  // namespace k3::gateway
