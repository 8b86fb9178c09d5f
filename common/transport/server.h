#pragma once
// The answering side of a service: one ROUTER socket and its connection thread.
//
// The connection thread owns the socket. It decodes, answers Ping, Hello and GetStatistics itself
// (so a service that computes for minutes still counts as alive), refuses garbage with an error
// reply, and puts every other request into a bounded queue. The service's own thread takes requests
// with next() and answers through the Responder; its replies go back through the same thread.
//
// A server with fast lanes (lane_host.h) takes requests from those as well: next() reads them on
// the service's thread, without a hop through the connection thread, and their replies go straight
// into the lane.
//
// While the service is loading, everything but control is refused as unavailable with the progress.

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "common/base/deadline.h"
#include "common/base/result.h"
#include "common/transport/lane_host.h"
#include "common/transport/messages/envelope.h"

namespace k3::transport {

class CurveKeys;
class ServerImpl;
struct ServerClient;

/// Sends replies to one request; copyable, usable from the service's threads, harmless after the
/// server or the client is gone.
///
/// Replies wait in the server while the client is slow. One that falls thousands of replies (or
/// hundreds of megabytes) behind gets a resource_exhausted error as the last reply of that request.
class Responder {
  public:
    Responder() = default;
    /// False once the client is known to be gone, or the request was cut off as above; what it
    /// sends is dropped then.
    bool send(msg::Body body, std::vector<msg::Bytes> frames = {}) const;
    bool send_error(const Error& error) const;  // `service` is the server's own name
    bool send_failure(msg::Failure failure) const;
    bool wants_reply() const noexcept { return call_id_ != 0; }

  private:
    friend class ServerImpl;
    std::weak_ptr<ServerImpl> server_;
    std::shared_ptr<ServerClient>
        client_;  // shared with the server and the client's other requests
    std::uint64_t call_id_ = 0;
    LaneTag lane_;  // where the request came from, if not from the socket
};

/// How far the side that computes has come, told in every Pong: whoever waits can tell a service
/// that gets on from one that is stuck while its connection thread goes on answering. Any thread.
struct WorkProgress {
    std::atomic<std::uint64_t> n_done{0};  // requests taken and parts of them done
    std::atomic<bool> waits_for_reads{false};

    void advance() noexcept { n_done.fetch_add(1, std::memory_order_relaxed); }
};

struct Request {
    msg::Envelope envelope;
    std::vector<msg::Bytes> frames;  // frames[0] is multipart frame 1
    Responder responder;
};

class Server {
  public:
    struct Options {
        std::string endpoint;  // ipc:///path or tcp://address:port
        std::uint64_t run_id = 0;
        msg::Announcement announcement;  // kind, name, version...; instance is filled in here
        std::size_t max_queue = 256;     // further requests get resource_exhausted
        std::size_t max_message_bytes = std::size_t{1} << 30U;
        // On tcp, only callers with the same keys are served. Owners: whoever has loaded them.
        std::shared_ptr<const CurveKeys> keys;
        bool insecure = false;  // allow tcp on a non-loopback address without keys
        // Gets lines for the log: clients that were refused, an endpoint that nothing protects.
        std::function<void(const std::string&)> warn;
        int lifeline_fd = -1;  // end of file on it means the launcher died: stop
        // Fast lanes for callers on this box; null: none. Owned by the server alone, shared only
        // because options are copied.
        std::shared_ptr<LaneHost> lanes;
        std::optional<Error> refused;  // a setting that cannot be meant: create() returns it
    };

    /// Binds at once, in state loading. Errors: resource_exhausted ("... is taken by another
    /// process", with the path or port), invalid_argument (malformed endpoint, path over 107 bytes,
    /// non-loopback without keys or `insecure`), io (directory missing, no permission).
    /// A socket file left by a dead process is removed and replaced.
    static Result<std::unique_ptr<Server>> create(Options options);

    /// Stops the thread, closes the socket, removes the ipc file.
    ~Server();
    Server(const Server&) = delete;
    Server& operator=(const Server&) = delete;

    /// For Pong and for refusals while loading. Any thread.
    void set_progress(std::uint32_t permille, std::string detail);
    /// Replaces what Hello answers (facts, fingerprint, arena) and switches to ready.
    /// An empty name, version or unknown kind keeps what create() was given.
    void set_ready(msg::Announcement announcement);
    /// From now on every request, and Hello, is answered with `error`. Any thread.
    void set_failed(Error error);
    /// Tells in every Pong which services this one waits for before it can compute anything; empty:
    /// none. Any thread.
    void set_waiting_for(std::string services);
    /// For the service to move; taking a request moves it as well. Lives as long as the server.
    WorkProgress& work() noexcept;
    /// Called on the connection thread for GetStatistics; must be thread-safe and quick. Never
    /// called any more once stopping() or next() has told of a stop, so it may use what its owner
    /// destroys after that; set_statistics({}) takes it back earlier.
    void set_statistics(std::function<std::vector<msg::Counter>()> counters);

    /// The next request, or nothing at the deadline or when stopping.
    std::optional<Request> next(Deadline deadline);
    /// The next request if one is waiting.
    std::optional<Request> try_next();

    /// A file descriptor that is readable while requests wait or a stop was asked
    /// (level-triggered), for services that poll several things. It knows nothing of lanes.
    int wait_fd() const noexcept;

    /// True after Shutdown, SIGTERM, SIGINT or the end of the lifeline. After the latter three the
    /// process ends by force (socket file and segments removed) if the server is not destroyed
    /// within 3 seconds.
    bool stopping() const noexcept;
    void request_stop() noexcept;

    std::uint64_t instance() const noexcept;
    const std::string& endpoint() const noexcept;

  private:
    explicit Server(std::shared_ptr<ServerImpl> impl);
    std::shared_ptr<ServerImpl> impl_;
};

/// Routes SIGTERM and SIGINT to Server::request_stop of every living server and ignores SIGPIPE.
/// After a second signal, or 3 seconds without a clean end, the process exits by itself, and
/// removes its socket file and segments.
void install_stop_signals();

}  // namespace k3::transport
