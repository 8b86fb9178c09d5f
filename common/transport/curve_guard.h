#pragma once
// Who may speak to a server with keys: ZeroMQ's authentication (ZAP) of one ROUTER socket.
//
// libzmq alone lets in everybody who knows the server's public key as soon as nobody answers its
// questions, so three things go together: the handler is bound before the socket, the socket is
// told to refuse everyone while it has no handler (option 93, which Debian's zmq.h does not name),
// and each message must carry the user id that only the handler gives out.
//
// The thread of the socket uses all of it.

#include <array>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "common/base/deadline.h"
#include "common/transport/curve_keys.h"
#include "common/transport/zmq_socket.h"

namespace k3::transport {

/// Makes `socket` a server that takes only clients which a ZAP handler of its context accepts. To
/// be called before it is bound.
void serve_with_keys(ZmqSocket& socket, const CurveKeys& keys);
/// Makes `socket` a client of such a server. To be called before it connects.
void call_with_keys(ZmqSocket& socket, const CurveKeys& keys);

class CurveGuard {
  public:
    /// Binds the handler and makes `server`, which is not bound yet, a server with these keys.
    /// `tell` gets a line for the log when clients are refused, seldom enough for a flood of them.
    CurveGuard(const ZmqContext& context, ZmqSocket& server, std::shared_ptr<const CurveKeys> keys,
               std::function<void(const std::string&)> tell);
    ~CurveGuard();
    CurveGuard(const CurveGuard&) = delete;
    CurveGuard& operator=(const CurveGuard&) = delete;

    /// Sockets to wait at, besides the server, before attend().
    std::array<void*, 2> sockets() const noexcept { return {handler_.get(), monitor_.get()}; }
    /// Answers the questions that have come. Until then their clients wait.
    void attend();
    /// True for messages of clients that were accepted here.
    bool is_accepted(const std::string& user_id) const noexcept { return user_id == user_id_; }
    /// A message came from someone who was not.
    void intruded();

    std::uint64_t n_refused() const noexcept { return n_refused_; }

  private:
    void answer(std::vector<msg::Bytes> question);
    void watch(const std::vector<msg::Bytes>& event);
    void refused(const std::string& address, const std::string& why);

    const std::shared_ptr<const CurveKeys> keys_;
    const std::function<void(const std::string&)> tell_;
    const std::string user_id_;
    ZmqSocket handler_;
    ZmqSocket monitor_;
    std::map<std::uint32_t, std::string> addresses_;  // of open connections, by descriptor
    std::string broken_off_;  // why the handshake failed whose end comes next
    std::uint64_t n_refused_ = 0;
    std::uint64_t n_untold_ = 0;
    std::optional<Clock::time_point> told_at_;
};

}  // namespace k3::transport
