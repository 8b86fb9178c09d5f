#pragma once
// The connection thread of a Server, and what it shares with the service's threads.
//
// Owned by the connection thread alone: the socket and the clients' backlogs.
// Everything else is shared and stands behind `mutex_`, or is atomic.

#include <atomic>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "common/base/fd.h"
#include "common/base/service_manager.h"
#include "common/transport/curve_guard.h"
#include "common/transport/endpoint.h"
#include "common/transport/ipc_listener.h"
#include "common/transport/server.h"
#include "common/transport/zmq_socket.h"

namespace k3::transport {

struct Outgoing {
    std::shared_ptr<ServerClient> client;  // empty in the client's own backlog
    msg::Bytes envelope;
    std::vector<msg::Bytes> frames;
    std::size_t bytes = 0;  // of both
};

/// One connection of a client: ZeroMQ gives a reconnecting client a new routing id.
struct ServerClient {
    std::string routing_id;
    std::deque<Outgoing> backlog;  // connection thread only: waiting for room in the socket
    // Under the server's mutex:
    bool gone = false;
    std::size_t waiting_messages = 0;  // on their way to the socket, backlog included
    std::size_t waiting_bytes = 0;
    std::set<std::uint64_t> cut_calls;  // cut off because the client was too slow
};

class ServerImpl : public std::enable_shared_from_this<ServerImpl> {
  public:
    explicit ServerImpl(Server::Options options);
    ~ServerImpl() = default;
    ServerImpl(const ServerImpl&) = delete;
    ServerImpl& operator=(const ServerImpl&) = delete;

    Status start();
    /// Ends the connection thread after a bounded flush.
    void finish();

    void set_progress(std::uint32_t permille, std::string detail);
    void set_ready(msg::Announcement announcement);
    void set_failed(Error error);
    void set_waiting_for(std::string services);
    WorkProgress& work() noexcept { return work_; }
    void set_statistics(std::function<std::vector<msg::Counter>()> counters);
    std::optional<Request> next(Deadline deadline);
    std::optional<Request> try_next();
    int wait_fd() const noexcept { return requests_event_.get(); }
    bool stopping() const noexcept;
    void request_stop() noexcept;
    std::uint64_t instance() const noexcept { return instance_; }
    const std::string& endpoint() const noexcept { return bound_endpoint_; }

    /// From any thread; see Responder::send.
    bool reply(const Responder& to, msg::Body body, std::vector<msg::Bytes> frames);

  private:
    struct Counts {
        std::uint64_t requests = 0;
        std::uint64_t malformed = 0;
        std::uint64_t refused = 0;
        std::uint64_t replies = 0;
        std::uint64_t replies_dropped = 0;
        std::uint64_t lane_requests = 0;
    };

    // server.cc: start
    Status bind();
    Status check_protection() const;
    Error bind_error(int problem) const;

    // connection.cc: the connection thread
    void run();
    void wait_for_events();
    void receive_messages();
    std::optional<std::vector<msg::Bytes>> receive_accepted();
    void handle_message(std::vector<msg::Bytes> frames);
    void handle_request(const std::shared_ptr<ServerClient>& client, msg::Envelope envelope,
                        std::vector<msg::Bytes> frames);
    void take_request(Request request);
    std::optional<Error> refusal_now() const;  // mutex_ held
    void refuse(const std::shared_ptr<ServerClient>& client, std::uint64_t call_id, Error error);
    msg::Body answer_hello(const msg::Hello& hello, const std::shared_ptr<ServerClient>& client);
    msg::Body answer_ping();
    msg::Body answer_statistics();
    std::shared_ptr<ServerClient> client_of(const msg::Bytes& routing_id);
    void collect_outgoing();
    void flush_backlogs();
    bool flush(ServerClient& client);
    void read_lifeline();
    void refuse_queued();
    void last_flush();
    Responder responder(std::shared_ptr<ServerClient> client, std::uint64_t call_id);
    Outgoing outgoing(const std::shared_ptr<ServerClient>& client, std::uint64_t call_id,
                      const msg::Body& body, std::vector<msg::Bytes> frames) const;
    void enqueue(Outgoing out);  // mutex_ held
    std::optional<Request> pop();

    // server_lanes.cc: requests that do not pass the connection thread
    std::optional<Request> pop_lane();
    std::optional<Request> read_lane(LaneHost::Call call);
    bool answer_lane(const Responder& to, const msg::Bytes& envelope,
                     const std::vector<msg::Bytes>& frames);
    void wait_for_request(Deadline deadline);
    void wake_service() noexcept;

    const Server::Options options_;
    Endpoint endpoint_;
    std::string bound_endpoint_;
    std::uint64_t instance_ = 0;
    const Clock::time_point started_ = Clock::now();
    Fd wake_event_;      // readable: the connection thread has something to do
    Fd requests_event_;  // readable: requests wait, or a stop was asked
    std::atomic<bool> stopping_{false};
    std::atomic<bool> finish_{false};
    WorkProgress work_;

    mutable std::mutex mutex_;
    msg::Announcement announcement_;
    std::uint32_t progress_permille_ = 0;
    std::string progress_detail_;
    std::string waiting_for_;
    std::optional<Error> failure_;
    std::deque<Request> requests_;
    std::deque<Outgoing> outgoing_;
    ServiceManager manager_ = ServiceManager::from_environment();  // alive(): connection thread
    Counts counts_;

    mutable std::recursive_mutex statistics_mutex_;  // held while the service's counters are read
    std::function<std::vector<msg::Counter>()> statistics_;

    // Connection thread only.
    std::unique_ptr<IpcListener> listener_;
    std::unique_ptr<ZmqContext> context_;
    std::unique_ptr<CurveGuard> guard_;  // null: everyone who reaches the endpoint is served
    std::unique_ptr<ZmqSocket> socket_;
    std::map<std::string, std::weak_ptr<ServerClient>> clients_;
    std::size_t clients_swept_at_ = 64;
    std::vector<std::shared_ptr<ServerClient>> slow_clients_;  // those with a backlog
    bool lifeline_ended_ = false;
    bool stop_handled_ = false;
    std::optional<Clock::time_point> forced_exit_at_;

    std::thread thread_;
};

}  // namespace k3::transport
