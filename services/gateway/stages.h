#pragma once
// The services a gateway drives: connections to them, whether they are there, and what happens when
// one of them is lost and comes back.
//
// All stages are ready or the pipeline is not: a step needs every one of them. When one is lost,
// all sessions end (state lives in the trunk), and it is looked for again with growing pauses,
// each look so short that clients do not notice it. Whoever comes back is checked against the
// others as at the start, and sessions that a former life of this gateway may have left open are
// dropped.
//
// One thread uses it.

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "common/base/deadline.h"
#include "common/base/result.h"
#include "common/transport/arena.h"
#include "common/transport/channel.h"
#include "services/gateway/compatibility.h"

namespace k3::gateway {

/// The first session number of the gateway at `endpoint`: the same in its next life, so that it can
/// drop what it left behind, and different from those of any other gateway at the same trunk.
std::uint64_t first_session(const std::string& endpoint, std::uint64_t run_id) noexcept;

struct Stage {
    std::string name;  // as it announces itself; before that, by its place: "trunk-0"
    std::unique_ptr<transport::Channel> channel;
    msg::Announcement announcement;
    bool up = false;              // said hello in its present life
    bool reads_previous = false;  // can read the arena of the trunk stage before it
    bool gateway_reads = false;   // this process can read its arena

    // While it is not up:
    Error missing;                        // what is known about it
    std::uint64_t logged_instance = 0;    // whose arrival has been logged
    std::uint32_t progress_permille = 0;  // of its loading
    Clock::time_point look_at;            // not before
    std::int64_t pause_ms = 0;
};

class Stages {
  public:
    struct Options {
        std::string tokenizer;           // endpoints
        std::vector<std::string> trunk;  // in the order rows pass through
        std::string sampler;
        std::uint64_t run_id = 0;
        bool use_shm = true;
        std::shared_ptr<const transport::CurveKeys> keys = nullptr;  // for stages on tcp
        std::uint64_t first_session = 1;    // this gateway's sessions are first_session and the
        std::uint32_t n_sessions = 1;       // n_sessions - 1 numbers after it
        std::function<bool()> interrupted;  // asked while waiting: true ends every wait
    };
    /// Error: invalid_argument (no trunk, malformed endpoint).
    static Result<std::unique_ptr<Stages>> create(Options options);

    /// If a stage is missing, looks for those whose pause is over: about 100 ms for each at most.
    /// Ok when all are ready. Errors: unavailable, naming the stage that is waited for and what is
    /// known about it; incompatible (see compatibility.h), tried again later all the same.
    Status tend();
    bool ready() const noexcept { return ready_; }
    /// How far loading is, for this gateway's own callers: the average over the stages.
    std::uint32_t progress_permille() const noexcept { return progress_permille_; }
    /// This process was told to stop: what fails from now on is nobody's fault.
    bool interrupted() const { return options_.interrupted && options_.interrupted(); }
    /// Valid once ready, and until the next time.
    const PipelineFacts& facts() const noexcept { return facts_; }

    /// Asks every stage for a sign of life, unless that was done within `max_age_ms`. A stage that
    /// gives none, or has been restarted, is lost.
    void verify(std::int64_t max_age_ms) { verify(max_age_ms, nullptr); }

    Stage& tokenizer() noexcept { return *all_.front(); }
    Stage& sampler() noexcept { return *all_.back(); }
    std::size_t n_trunk() const noexcept { return all_.size() - 2; }
    Stage& trunk(std::size_t i) noexcept { return *all_[i + 1]; }
    transport::ArenaReader& reader() noexcept { return reader_; }

    /// A call and its two halves. After an error, failure() tells whose it is; if the stage itself
    /// is gone or restarted, and not only this call refused, ready() is false from then on. So it
    /// is when another stage is found lost during a long wait: the call is given up then, because
    /// what it computes has no use any more.
    Result<transport::Reply> call(Stage& stage, msg::Body body, std::vector<msg::Bytes> frames,
                                  Deadline deadline);
    Result<std::uint64_t> send(Stage& stage, msg::Body body, std::vector<msg::Bytes> frames);
    Result<transport::Reply> receive(Stage& stage, std::uint64_t call_id, Deadline deadline);
    /// A call that is waited for while others are made.
    struct LongCall {
        std::uint64_t id = 0;
        std::optional<Error> silence;
    };
    /// Its answer or error, as receive() would give it, if it is there within `wait_ms`.
    std::optional<Result<transport::Reply>> poll(Stage& stage, LongCall& call,
                                                 std::int64_t wait_ms);
    /// For an answer that came and is wrong: the stage is to blame, but there.
    Error blame(Stage& stage, Error error);
    /// The error of the last call that gave none, with the service that first said it.
    const msg::Failure& failure() const noexcept { return failure_; }
    /// While not ready: what made it so.
    const msg::Failure& loss() const noexcept { return loss_; }

    /// Ends `sessions` on every trunk stage that is there. Ending one twice is safe. Leaves
    /// failure() alone.
    void drop_sessions(std::span<const std::uint64_t> sessions);

  private:
    explicit Stages(Options options);
    Status add(std::string name, const std::string& endpoint);
    void look(Stage& stage);
    Status link();
    Status say_hello(Stage& stage, const std::vector<msg::SegmentProbe>& probes);
    Status say_hello_after(Stage& stage, const Stage* before);
    Status drop_on(Stage& stage, std::span<const std::uint64_t> sessions);
    void absent(Stage& stage, Error error);
    bool alive(Stage& stage);
    void verify(std::int64_t max_age_ms, const Stage* except);
    Result<transport::Reply> wait_for(Stage& stage, std::uint64_t call_id, Deadline deadline);
    Error judge(Stage& stage, Error error);

    Options options_;
    std::vector<std::unique_ptr<Stage>> all_;  // tokenizer, trunk stages, sampler
    transport::ArenaReader reader_;
    PipelineFacts facts_;
    bool ready_ = false;
    std::uint32_t progress_permille_ = 0;
    msg::Failure failure_;
    msg::Failure loss_;
    Clock::time_point verified_at_;
};

}  // namespace k3::gateway
