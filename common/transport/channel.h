#pragma once
// The calling side: one DEALER socket to one service, with deadlines and signs of life.
//
// A caller must tell three silences apart: the peer computes (pongs keep coming), the peer is gone
// (no pong for `liveness_ms`), and the peer was restarted (a pong with another instance: the call
// died with the old process and will never be answered). The last two end every outstanding call
// with `unavailable` at once (some milliseconds later in a fast lane); whether to repeat is the
// caller's decision, because only it knows which calls are pure.
//
// One thread uses a Channel. Calls may be outstanding in any number and are answered in any order.

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "common/base/cores.h"
#include "common/base/deadline.h"
#include "common/base/result.h"
#include "common/transport/messages/envelope.h"

namespace k3::transport {

class CurveKeys;

struct Reply {
    msg::Body body;
    std::vector<msg::Bytes> frames;
};

class Channel {
  public:
    struct Options {
        std::string endpoint;
        std::string peer;  // how errors call it: "experts-1"
        std::uint64_t run_id = 0;
        std::int64_t ping_ms = 250;  // while calls are outstanding
        // Silence that means gone. A process that ends is noticed at once by its connection; this
        // is for one that is frozen, or a box that is cut off, and must not take a process for
        // either that merely waits for CPU or memory on a busy box.
        std::int64_t liveness_ms = 5000;
        std::size_t max_message_bytes = std::size_t{1} << 30U;
        // Ask for a fast lane (lane_link.h), which the peer gives if it can read the first segment
        // of hello's probes, so if both share a box. An ExpertCall takes it when it is free and
        // large enough; everything else, and all signs of life, take the socket.
        bool use_lane = false;
        // Shown to peers on tcp, which must have the same. Owners: whoever has loaded them.
        std::shared_ptr<const CurveKeys> keys = nullptr;
    };
    /// Connects lazily: no peer needs to exist yet. Error: invalid_argument (malformed endpoint).
    static Result<std::unique_ptr<Channel>> create(Options options);
    ~Channel();
    Channel(const Channel&) = delete;
    Channel& operator=(const Channel&) = delete;

    /// Says hello until the peer answers that it is ready. Must precede send().
    /// Errors: unavailable or deadline_exceeded (naming peer, endpoint, its state and progress),
    /// incompatible (protocol versions), invalid_argument (the peer does not accept our keys, or
    /// only one side has any), or the failure the peer reports.
    /// Called again after `unavailable` to meet the new instance.
    Result<msg::Announcement> hello(const std::vector<msg::SegmentProbe>& probes,
                                    Deadline deadline);

    /// That has happened, and the connection has stood since, as far as anybody has looked.
    bool is_greeted() const noexcept;

    /// One question about the peer's state; does not need hello().
    Result<msg::Pong> ping(Deadline deadline);

    /// Sends a request and returns its call id. Error: unavailable (no hello, or queue full).
    Result<std::uint64_t> send(msg::Body body, std::vector<msg::Bytes> frames = {});
    /// Sends without wanting a reply; lost silently if the peer is gone.
    void post(msg::Body body);

    /// The next reply to `call_id` (a streamed call has several; `more` says whether to keep the
    /// call outstanding). A Failure reply comes back as its Error, with the service named.
    /// Errors: unavailable (gone or restarted), deadline_exceeded, stale (the fast lane is damaged
    /// and given up: the same request takes the socket the next time).
    Result<Reply> receive(std::uint64_t call_id, Deadline deadline, bool more = false);
    /// How long the peer has given no sign of life on this connection, pings included, while a call
    /// was waited for. For callers that judge silence by more than liveness_ms.
    std::int64_t silent_ms() const noexcept;
    /// Takes the peer for lost: every outstanding call ends with `unavailable` and `reason` ("does
    /// not answer"), and the next hello makes a new connection.
    void give_up(const std::string& reason);
    /// Ends interest in a streamed call.
    void forget(std::uint64_t call_id) noexcept;

    /// send + receive.
    Result<Reply> call(msg::Body body, std::vector<msg::Bytes> frames, Deadline deadline);

    /// The fast lane, if hello agreed on one and it has worked since.
    struct Lane {
        bool is_open = false;
        std::string trouble;       // why one that was offered is not used
        CoreUse peer_cores;        // for its compute threads
        std::uint64_t n_sent = 0;  // requests through all lanes of this channel
    };
    const Lane& lane() const noexcept;
    /// True if an ExpertCall of so many bytes (tensors and picks) would take it now, and its reply.
    bool lane_takes(std::size_t request_bytes, std::size_t reply_bytes) const noexcept;
    /// How long both ends of the lane spin before they sleep; at first 0.
    void set_lane_spin_us(std::uint32_t us) noexcept;

    /// Which service the last error returned here is about: the one a Failure named, else the peer.
    /// For passing a failure on as a msg::Failure. Empty before the first error.
    const std::string& failed_service() const noexcept;

    const Options& options() const noexcept;

  private:
    class Impl;
    explicit Channel(std::unique_ptr<Impl> impl);
    std::unique_ptr<Impl> impl_;
};

/// The reply's body as T, or an internal error naming both types.
template <typename T>
Result<T> expect(Result<Reply> reply, const std::string& peer) {
    if (!reply.has_value()) return std::move(reply).error();
    if (T* body = std::get_if<T>(&reply->body)) return std::move(*body);
    return Error{ErrorCode::internal,
                 peer + " answered with an unexpected " + std::string(msg::name_of(reply->body)),
                 "check that the endpoint belongs to the right service"};
}

}  // namespace k3::transport
