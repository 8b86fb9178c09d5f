#pragma once
// Stands between a client and a service on unix sockets, and cuts their connections on demand: both
// sides live on, as when a network fails for a moment.

#include <atomic>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "common/base/fd.h"

namespace k3::test {

class SocketProxy {
  public:
    /// Two "ipc://" endpoints: where clients connect, and where the service listens. Failing to
    /// listen ends the test run.
    SocketProxy(const std::string& front, const std::string& back);
    ~SocketProxy();
    SocketProxy(const SocketProxy&) = delete;
    SocketProxy& operator=(const SocketProxy&) = delete;

    /// Ends every connection there is; new ones work.
    void cut();

  private:
    struct Link {
        Fd client;
        Fd service;
    };
    void run();
    void accept_one();
    static bool pump(const Fd& from, const Fd& to);

    std::string back_;
    Fd listener_;
    std::vector<Link> links_;  // the thread's own
    std::atomic<bool> stop_ = false;
    std::atomic<bool> cut_ = false;
    std::thread thread_;
};

}  // namespace k3::test
