#pragma once
// The running requests, and the loop that moves all of them one step ahead.
//
// A step computes rows of every running request at once (step_plan.h), except those whose session
// is on its way from or to a disk, samples a token for each whose rows are all fed, turns the
// tokens into text and sends what became certain. Everything that can end a request ends it here:
// stop ids and strings, limits, a cancel, a client that is gone, an error of a stage.
//
// One thread uses it.

#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "common/telemetry/counters.h"
#include "services/gateway/pipeline.h"
#include "services/gateway/request.h"

namespace k3::gateway {

using RequestPtr = std::unique_ptr<GenerationRequest>;

class GenerationLoop {
  public:
    struct Options {
        std::uint32_t max_requests = 16;
        std::uint32_t prefill_chunk = 256;  // rows of one prompt per step
        std::uint64_t first_session = 1;    // numbers of the sessions, max_requests of them
    };
    GenerationLoop(const Options& options, Pipeline& pipeline, telemetry::Counters& counters);

    bool idle() const noexcept { return running_.empty(); }
    std::size_t n_running() const noexcept { return running_.size(); }
    bool full() const noexcept;

    /// Opens the request's session, or begins to load it. On an error it stays with the caller; not
    /// to be called when full().
    Status start(RequestPtr& request);

    /// Requests whose session could not be loaded, and why.
    struct Returned {
        RequestPtr request;
        msg::Failure failure;
    };
    std::vector<Returned> take_returned();

    /// True if `handle` is running: it ends here, with what text was held back.
    bool cancel(std::uint64_t handle);

    /// Goes on with requests whose sessions have been loaded or saved, and runs one step. When a
    /// stage is lost during it, the pipeline is no longer ready, and the caller ends all requests.
    void step();
    /// True if a step has something to compute; otherwise sessions are waited for.
    bool computes() const noexcept;

    /// Ends every running request with `failure`.
    void fail_all(const msg::Failure& failure);

  private:
    /// A request that was given a token in this step, on its way to becoming an event.
    struct Turn {
        GenerationRequest* request = nullptr;
        std::size_t want = 0;  // its row of the logits
        msg::SampledRow sampled;
        std::optional<msg::FinishReason> reason;
        std::string text;
        std::string stop_string;
    };

    StepPlan plan();
    void report_prompts(const StepPlan& plan, Logits& logits);
    std::vector<Turn> sample(const StepPlan& plan, Logits& logits);
    void decode(std::vector<Turn>& turns);
    void add_text(Turn& turn, msg::Decoded decoded);
    void send_token(Turn& turn, Logits& logits);
    Status open(GenerationRequest& request, std::uint64_t session);
    void move_sessions();
    void end_load(GenerationRequest& request, const Result<bool>& moved);
    void give_back(GenerationRequest& request, msg::Failure failure);
    void begin_save(GenerationRequest& request);
    void end_save(GenerationRequest& request, std::optional<msg::Failure> failure);
    void finish(GenerationRequest& request, const Turn* turn, msg::FinishReason reason);
    void send_finished(GenerationRequest& request);
    void fail(GenerationRequest& request, const msg::Failure& failure);
    /// Ends without a word: the client is gone.
    void abandon(GenerationRequest& request);
    bool has_ended(const GenerationRequest& request) const noexcept;
    /// It has had all its tokens, in this step or before.
    bool is_done(const GenerationRequest& request) const noexcept {
        return request.is_saving() || has_ended(request);
    }
    void remove_ended();

    Options options_;
    Pipeline& pipeline_;
    std::vector<RequestPtr> running_;
    std::vector<std::uint64_t> ended_;  // handles of running requests that ended in this step
    std::vector<Returned> returned_;
    std::vector<bool> session_used_;
    std::size_t turn_ = 0;
    std::atomic<std::uint64_t>& steps_;
    std::atomic<std::uint64_t>& step_rows_;
    std::atomic<std::uint64_t>& prompt_tokens_;
    std::atomic<std::uint64_t>& reused_tokens_;
    std::atomic<std::uint64_t>& generated_tokens_;
    std::atomic<std::uint64_t>& finished_;
    std::atomic<std::uint64_t>& cancelled_;
    std::atomic<std::uint64_t>& failed_;
    std::atomic<std::uint64_t>& clients_gone_;
};

}  // namespace k3::gateway
