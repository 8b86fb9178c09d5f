#pragma once
// Stages for tests of the gateway: small, deterministic, and able to misbehave on demand.
//
// Each is a real transport::Server on its own thread, spoken to over a socket in a temporary
// directory. The fake trunk computes logits from the ids a session has been fed and from nothing
// else, so any mix-up of sessions, positions or stages changes the text.

#include <atomic>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "common/base/result.h"
#include "common/transport/arena.h"
#include "common/transport/server.h"

namespace k3::test {

/// A directory for sockets, removed with everything in it.
class SocketDir {
  public:
    SocketDir();
    ~SocketDir();
    SocketDir(const SocketDir&) = delete;
    SocketDir& operator=(const SocketDir&) = delete;
    std::string endpoint(const std::string& name) const;  // "ipc://<dir>/<name>"

  private:
    std::string path_;
};

/// A server with a thread that answers. start() may follow stop(): that is a restart.
class FakeStage {
  public:
    FakeStage(std::string endpoint, msg::ServiceKind kind, std::string name);
    virtual ~FakeStage();
    FakeStage(const FakeStage&) = delete;
    FakeStage& operator=(const FakeStage&) = delete;

    void start();
    /// Without a word to anybody who waits for an answer.
    void stop();
    /// Waits until `n` more requests have been taken than when the stage was created.
    bool wait_for_requests(std::uint64_t n, std::int64_t ms = 5000) const;
    std::uint64_t n_requests() const { return n_requests_; }

    const std::string& endpoint() const { return endpoint_; }

    // Set before start().
    std::string fingerprint = "00112233445566778899aabbccddeeff";
    bool stays_loading = false;

    /// Asked first for each request, on the stage's thread: an error is the answer then.
    void set_fault(std::function<std::optional<msg::Failure>(const msg::Body&)> fault);
    /// While true, requests are taken and not answered.
    std::atomic<bool> mute = false;

  protected:
    virtual void prepare(msg::Announcement& announcement) = 0;
    virtual void reset() {}
    virtual void answer(transport::Request& request) = 0;

    transport::ArenaReader reader_;
    std::unique_ptr<transport::Arena> arena_;

  private:
    void serve();

    std::string endpoint_;
    msg::ServiceKind kind_;
    std::string name_;
    std::unique_ptr<transport::Server> server_;
    std::thread thread_;
    std::atomic<bool> stop_ = false;
    std::atomic<std::uint64_t> n_requests_ = 0;
    std::mutex mutex_;
    std::function<std::optional<msg::Failure>(const msg::Body&)> fault_;
};

/// Ids 0 to 255 are bytes, then come kStop and kSpecial, then tokens of several bytes.
class FakeTokenizer final : public FakeStage {
  public:
    static constexpr std::uint32_t kStop = 256;     // the model's stop id, "<stop>"
    static constexpr std::uint32_t kSpecial = 257;  // "<special>"
    static constexpr std::uint32_t kLong = 258;     // "hello"
    static constexpr std::uint32_t kVocabSize = 260;

    explicit FakeTokenizer(std::string endpoint)
        : FakeStage(std::move(endpoint), msg::ServiceKind::tokenizer, "tokenizer") {}
    std::uint32_t vocab_size = kVocabSize;

  protected:
    void prepare(msg::Announcement& announcement) override;
    void answer(transport::Request& request) override;
};

class FakeTrunk final : public FakeStage {
  public:
    struct Layers {
        std::uint32_t first = 0;
        std::uint32_t n = 4;
        std::uint32_t total = 4;
    };
    FakeTrunk(std::string endpoint, std::string name) : FakeTrunk(endpoint, name, Layers{}) {}
    FakeTrunk(std::string endpoint, std::string name, Layers layers)
        : FakeStage(std::move(endpoint), msg::ServiceKind::trunk, std::move(name)),
          layers_(layers) {}

    // Set before start().
    std::uint64_t max_positions = 4096;
    std::uint32_t max_step_rows = 512;
    std::uint32_t max_sessions = 64;
    std::uint32_t vocab_size = FakeTokenizer::kVocabSize;
    std::uint32_t hidden_size = 8;
    bool use_arena = true;
    std::optional<std::uint32_t> in_vectors;         // instead of what follows from the layers
    std::optional<std::uint32_t> answer_vocab_size;  // of the logits, instead of what it announces

    /// The id whose logit is largest after `history`. Default: a letter that depends on all of it.
    /// On the stage's thread.
    std::function<std::uint32_t(const std::vector<std::uint32_t>& history)> next;
    /// May change a row of logits before it is sent. On the stage's thread.
    std::function<void(const std::vector<std::uint32_t>& history, std::vector<float>& logits)>
        spoil;

    /// The logits after `history`, for comparison.
    std::vector<float> logits_after(const std::vector<std::uint32_t>& history) const;

    /// What SaveSession left, by name; kept over a restart, like files.
    std::map<std::string, std::vector<std::uint32_t>> saved() const;
    void set_saved(const std::string& name, std::vector<std::uint32_t> ids);

    std::size_t n_sessions() const;
    /// Numbers of rows of the steps so far.
    std::vector<std::size_t> step_sizes() const;
    std::size_t n_shm_inputs() const { return n_shm_inputs_; }

  protected:
    void prepare(msg::Announcement& announcement) override;
    void reset() override;
    void answer(transport::Request& request) override;

  private:
    Result<msg::Body> open(const msg::OpenSession& open);
    Result<msg::Body> load(const msg::LoadSession& load);
    Result<msg::Body> save(const msg::SaveSession& save);
    Result<msg::StepResult> step(const msg::Step& step, std::vector<msg::Bytes>& in,
                                 std::vector<msg::Bytes>& out);
    bool first() const { return layers_.first == 0; }
    bool last() const { return layers_.first + layers_.n == layers_.total; }

    Layers layers_;
    mutable std::mutex state_mutex_;
    std::map<std::uint64_t, std::vector<std::uint32_t>> sessions_;
    std::map<std::uint64_t, std::uint64_t> reserved_;
    std::map<std::string, std::vector<std::uint32_t>> saved_;
    std::vector<std::size_t> step_sizes_;
    std::atomic<std::size_t> n_shm_inputs_ = 0;
};

/// The largest logit; refuses a NaN, naming the row.
class FakeSampler final : public FakeStage {
  public:
    explicit FakeSampler(std::string endpoint)
        : FakeStage(std::move(endpoint), msg::ServiceKind::sampler, "sampler") {}
    std::uint32_t max_rows = 64;
    std::size_t n_shm_inputs() const { return n_shm_inputs_; }

  protected:
    void prepare(msg::Announcement& announcement) override;
    void answer(transport::Request& request) override;

  private:
    Result<msg::Sampled> sample(const msg::Sample& call, std::vector<msg::Bytes>& frames);
    std::atomic<std::size_t> n_shm_inputs_ = 0;
};

}  // namespace k3::test
