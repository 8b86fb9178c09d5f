#pragma once
// What the stages can do, as calls: text to ids, rows to logits, logits to tokens, ids to text.
//
// Every call waits for its answer, except that saving and loading sessions may take as long as
// disks do and is looked at from time to time. After an error, stages().failure() tells which
// service it comes from, and stages().ready() whether the stage is still there.
//
// Tensors stay where they are if they can: hidden rows and logits that a stage left in its arena
// are passed on by reference when the next reader can open that arena, and travel through this
// process as bytes otherwise. Both ways end in the same bits.

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "common/base/result.h"
#include "common/transport/messages/gateway.h"
#include "common/transport/messages/tokenizer.h"
#include "services/gateway/stages.h"
#include "services/gateway/step_plan.h"

namespace k3::gateway {

/// A tensor a stage answered with, still where the stage put it.
struct StageOutput {
    msg::Tensor tensor;
    std::vector<msg::Bytes> frames;
};

/// The logits of a step: [n_want, vocab_size] f32.
struct Logits {
    StageOutput output;
    bool sampler_reads = false;  // the sampler can follow the reference
    bool loaded = false;
    msg::Bytes bytes;  // all rows, once loaded
};

/// A row of the logits and how to sample it.
struct SampleJob {
    std::size_t want = 0;  // index of the row
    msg::SampleRow row;
};

/// A session on its way from memory to disk or back, on every trunk stage at once.
struct SessionTransfer {
    msg::Body request;  // SaveSession or LoadSession
    std::vector<Stages::LongCall> calls;
    std::vector<std::optional<msg::Body>> answers;
    Deadline deadline = Deadline::after_ms(0);
};

class Pipeline {
  public:
    struct Options {
        std::int64_t step_wait_ms = 3'600'000;  // a stage computes, or saves or loads a session
        std::int64_t call_wait_ms = 60'000;     // a stage answers anything else
    };
    Pipeline(const Options& options, Stages& stages);

    Stages& stages() noexcept { return stages_; }

    /// The prompt's ids. Errors: the tokenizer's (invalid UTF-8, a malformed conversation).
    Result<std::vector<std::uint32_t>> encode(const msg::Submit& submit);

    /// Opens `session` on every trunk stage, or on none. `save_as`: see trunk.capnp; may be empty.
    Status open_session(std::uint64_t session, std::uint64_t max_positions,
                        const std::string& save_as);

    /// Begins to save a session, or to open one with what was saved as load.name where the prompt
    /// load.ids continues that.
    Result<SessionTransfer> begin(msg::Body save_or_load);
    /// Whether all stages have answered, looking at each for `wait_ms`. After an error the transfer
    /// is over; what some stages have loaded is dropped, and some may have saved the new file while
    /// others have the old one: a load says so then.
    Result<bool> poll(SessionTransfer& transfer, std::int64_t wait_ms);
    void give_up(const SessionTransfer& transfer);

    /// Of a transfer that is over. Errors: incompatible, if the files of the stages stand for
    /// different ids; internal. The session is dropped then.
    Result<msg::LoadedSession> loaded(const SessionTransfer& transfer);
    /// The bytes of all files.
    static std::uint64_t saved_bytes(const SessionTransfer& transfer);

    /// Runs the plan's rows through all layers.
    Result<Logits> step(const StepPlan& plan);

    /// The bytes of `n` rows of the logits, copied.
    Result<msg::Bytes> rows(Logits& logits, std::size_t first, std::size_t n);

    /// One result per job. A row the sampler refuses does not take the others with it.
    std::vector<Result<msg::SampledRow>> sample(Logits& logits, std::vector<SampleJob> jobs);

    /// One result per piece.
    std::vector<Result<msg::Decoded>> decode(std::vector<msg::Decode> pieces);

  private:
    template <typename T>
    Result<T> ask(Stage& stage, msg::Body body, std::int64_t wait_ms,
                  std::vector<msg::Bytes>&& frames = {},
                  std::vector<msg::Bytes>* answered = nullptr);
    template <typename T>
    Result<T> answer(Stage& stage, Result<transport::Reply> reply);
    template <typename T>
    Status is_answer(Stage& stage, const Result<transport::Reply>& reply);
    Result<StageOutput> run_stage(std::size_t i, const StepPlan& plan, StageOutput hidden);
    Status load(Stage& owner, StageOutput& output, msg::Bytes& bytes);
    Result<StageOutput> forward(Stage& owner, StageOutput output, bool reader_can);
    Result<std::vector<msg::SampledRow>> sample_call(Logits& logits,
                                                     std::span<const SampleJob> jobs);
    Status make_inline(Logits& logits, std::span<const SampleJob> jobs, StageOutput& out);

    Options options_;
    Stages& stages_;
};

}  // namespace k3::gateway
