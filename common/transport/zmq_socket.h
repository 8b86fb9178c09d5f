#pragma once
// ZeroMQ's sockets as owners of what they hold, without exceptions and without interruption by
// signals. Everything here is non-blocking: who waits, polls.

#include <cstddef>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "common/transport/messages/types.h"

namespace k3::transport {

/// Linger and high-water marks of all sockets; docs/protocol.md has the table.
inline constexpr int kHighWaterMark = 8;
inline constexpr int kLingerMs = 200;

class ZmqContext {
  public:
    ZmqContext();
    ~ZmqContext();  // waits for the linger time of its sockets at most
    ZmqContext(const ZmqContext&) = delete;
    ZmqContext& operator=(const ZmqContext&) = delete;
    void* get() const noexcept { return context_; }

  private:
    void* context_;
};

enum class SendOutcome { sent, would_block, unreachable };

class ZmqSocket {
  public:
    ZmqSocket(const ZmqContext& context, int type);
    ~ZmqSocket();
    ZmqSocket(const ZmqSocket&) = delete;
    ZmqSocket& operator=(const ZmqSocket&) = delete;

    void* get() const noexcept { return socket_; }
    void set(int option, int value) noexcept;
    void set_max_message_bytes(std::size_t bytes) noexcept;
    /// 0, or the errno of the failure.
    int bind(const std::string& endpoint) noexcept;
    int connect(const std::string& endpoint) noexcept;
    /// The address of the last bind, with the port the system chose.
    std::string last_endpoint() const;

    /// All frames of the next message if one has arrived.
    std::optional<std::vector<msg::Bytes>> receive();
    /// The same of a ROUTER, and the user id that a ZAP handler gave the sender; empty if none did,
    /// or if the frames do not agree. `user_id` is empty before.
    std::optional<std::vector<msg::Bytes>> receive(std::string& user_id);

    /// Sends `routing_id` (if not empty), `envelope` and `frames` as one message. They are consumed
    /// only by `sent`.
    SendOutcome send(const std::string& routing_id, msg::Bytes& envelope,
                     std::vector<msg::Bytes>& frames);

  private:
    std::optional<std::vector<msg::Bytes>> receive(std::string* user_id);
    int send_frame(msg::Bytes& bytes, int flags);
    void* socket_;
};

}  // namespace k3::transport
