#pragma once
// The tokenizer's three messages: Encode, Decode and RenderChat. It remembers nothing between
// calls.
//
// Threads: the service loop calls handle(). Calls with much text go to a worker of their own, so
// that a megabyte of prompt does not hold up the few ids of everybody else's next token.

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <filesystem>
#include <memory>
#include <mutex>
#include <string>
#include <thread>

#include "common/telemetry/counters.h"
#include "common/transport/server.h"
#include "services/tokenizer/chat.h"
#include "services/tokenizer/decoder.h"
#include "services/tokenizer/encoder.h"
#include "services/tokenizer/vocabulary.h"

namespace k3::tokenizer {

class Service {
  public:
    /// Loads config.json, the vocabulary and, if the directory holds a checkpoint's index, the
    /// checkpoint's fingerprint.
    /// Errors: those of the files; incompatible if they do not belong together.
    static Result<std::unique_ptr<Service>> create(const std::filesystem::path& directory);

    /// Ends the worker after the call it is at; long calls that still wait are dropped.
    ~Service();
    Service(const Service&) = delete;
    Service& operator=(const Service&) = delete;

    /// Answers any request: with its result, or with an error that says what is wrong with it.
    void handle(transport::Request request);

    /// The answer to one message. Any thread.
    /// Errors: those of Encoder, Decoder and render_chat(); unsupported for other messages.
    Result<msg::Body> answer(const msg::Body& body) const;

    /// vocab_size, n_ranks, and the ids that end a generation: the config's eos, the end of a
    /// message, and the tokenizer's own eos (spec section 4.5).
    const msg::TokenizerFacts& facts() const noexcept { return facts_; }
    /// Of the checkpoint; empty if the directory holds only the tokenizer's files.
    const std::string& fingerprint() const noexcept { return fingerprint_; }
    const telemetry::Counters& counters() const noexcept { return counters_; }

  private:
    explicit Service(Vocabulary vocabulary);

    Result<msg::Body> encode(const msg::Encode& call) const;
    Result<msg::Body> decode(const msg::Decode& call) const;
    Result<msg::Body> render(const msg::RenderChat& call) const;
    void answer_and_count(const transport::Request& request);
    void work();

    Vocabulary vocabulary_;
    Encoder encoder_;
    Decoder decoder_;
    std::unique_ptr<ChatEncoder> chat_;  // set by create()
    msg::TokenizerFacts facts_;
    std::string fingerprint_;

    telemetry::Counters counters_;
    std::atomic<std::uint64_t>& calls_;
    std::atomic<std::uint64_t>& refused_calls_;
    std::atomic<std::uint64_t>& text_bytes_;
    std::atomic<std::uint64_t>& ids_;
    std::atomic<std::uint64_t>& compute_ns_;

    std::mutex mutex_;
    std::condition_variable wake_;
    std::deque<transport::Request> long_calls_;  // guarded by mutex_
    bool stopping_ = false;                      // guarded by mutex_
    std::thread worker_;
};

}  // namespace k3::tokenizer
