#pragma once
// A service that answers whatever a test wants, on a thread of the test process.

#include <zmq.h>

#include <atomic>
#include <functional>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "common/base/check.h"
#include "common/transport/messages/envelope.h"
#include "common/transport/zmq_socket.h"

namespace k3::test {

/// An envelope as a build of protocol version 2 would send it.
inline msg::Bytes of_another_version(const msg::Envelope& envelope) {
    msg::Bytes bytes = msg::encode(envelope);
    bytes[16] = std::byte{2};  // the version is the first field of the first struct
    return bytes;
}

class FakePeer {
  public:
    /// The bytes of the answer to a request; none: it gets no answer.
    using Answer = std::function<std::optional<msg::Bytes>(const msg::Envelope&)>;

    FakePeer(const std::string& endpoint, Answer answer)
        : socket_(context_, ZMQ_ROUTER), answer_(std::move(answer)) {
        K3_CHECK(socket_.bind(endpoint) == 0, endpoint);
        thread_ = std::thread([this] { run(); });
    }
    ~FakePeer() {
        stop_.store(true);
        thread_.join();
    }
    FakePeer(const FakePeer&) = delete;
    FakePeer& operator=(const FakePeer&) = delete;

  private:
    void run() {
        while (!stop_.load()) {
            zmq_pollitem_t item{socket_.get(), 0, ZMQ_POLLIN, 0};
            ::zmq_poll(&item, 1, 10);
            while (auto frames = socket_.receive()) {
                std::uint64_t call_id = 0;
                auto request = msg::decode((*frames)[1], call_id);
                if (!request.has_value()) continue;
                std::optional<msg::Bytes> reply = answer_(*request);
                if (!reply) continue;
                const msg::Bytes& id = (*frames)[0];
                std::vector<msg::Bytes> none;
                socket_.send({reinterpret_cast<const char*>(id.data()), id.size()}, *reply, none);
            }
        }
    }

    transport::ZmqContext context_;
    transport::ZmqSocket socket_;
    Answer answer_;
    std::atomic<bool> stop_{false};
    std::thread thread_;
};

}  // namespace k3::test
