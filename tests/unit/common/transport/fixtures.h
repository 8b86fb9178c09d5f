#pragma once
// A server on a socket of its own, and channels to it.

#include <atomic>
#include <functional>
#include <memory>
#include <string>
#include <thread>

#include "common/transport/channel.h"
#include "common/transport/server.h"
#include "tests/support/checkpoint_copy.h"

namespace k3::transport::test {

/// A folder for socket files, and the endpoints in it.
class Sockets {
  public:
    std::string path(const std::string& name) const { return (dir_.path() / name).string(); }
    std::string endpoint(const std::string& name) const { return "ipc://" + path(name); }

  private:
    k3::test::TempDir dir_;
};

Server::Options server_options(const std::string& endpoint, const std::string& name = "echo");
std::unique_ptr<Server> make_server(const std::string& endpoint, bool ready = true);
std::unique_ptr<Channel> make_channel(const std::string& endpoint);

/// The body of a call: the smallest message that carries words.
inline msg::Encode text(const std::string& text) { return {text, false, false}; }

/// Says hello; the test fails if the peer is not ready within 10 seconds.
msg::Announcement greet(Channel& channel);

/// Serves `server` on a thread of its own until it stops.
class Worker {
  public:
    using Handler = std::function<void(Request&)>;
    Worker(Server& server, Handler handler);
    ~Worker();  // stops the server
    Worker(const Worker&) = delete;
    Worker& operator=(const Worker&) = delete;

  private:
    Server& server_;
    std::thread thread_;
};

/// Answers Encode with one id per byte, and every frame with itself.
void echo(Request& request);

}  // namespace k3::transport::test
