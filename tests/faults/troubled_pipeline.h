#pragma once
// A pipeline whose expert servers are killed, frozen and cut off while it generates.
//
// Half of its servers are started by the launcher, on this box and in fast lanes; the other half is
// attached, over TCP behind a proxy that can lose their connections. With one replica each half
// holds one of two shares, with two both halves hold everything.

#include <sys/types.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "tests/support/gateway_client.h"
#include "tests/support/pipeline.h"
#include "tests/support/socket_proxy.h"

namespace k3::test {

class TroubledPipeline {
  public:
    TroubledPipeline(World& world, int n_replicas);
    ~TroubledPipeline();
    TroubledPipeline(const TroubledPipeline&) = delete;
    TroubledPipeline& operator=(const TroubledPipeline&) = delete;

    /// Servers the launcher watches over, and those behind proxies.
    std::size_t n_near() const noexcept { return n_near_; }
    std::size_t n_far() const noexcept { return far_.size(); }
    pid_t near_pid(std::size_t i) const;
    void kill_far(std::size_t i) { far_[i].program.reset(); }
    void start_far(std::size_t i) { start_far(far_[i]); }
    SocketProxy& proxy(std::size_t i) { return *far_[i].proxy; }

    /// A counter of the trunk.
    std::uint64_t counter(const std::string& name);
    /// True when all servers can be called; false after half a minute.
    bool is_whole();

    /// Tokens generated so far; each request was equal to an undisturbed one in every byte.
    std::uint64_t n_tokens() const noexcept { return n_tokens_; }
    /// What went wrong with a generation; empty: nothing.
    std::string failure() const;

  private:
    struct Far {
        std::string share;
        std::string back;
        std::unique_ptr<Program> program;
        std::unique_ptr<SocketProxy> proxy;
    };
    std::string describe(int n_replicas);
    void start_far(Far& far);
    void generate();
    void fail(const std::string& what);

    World& world_;
    std::size_t n_near_ = 0;
    std::vector<Far> far_;
    std::unique_ptr<Pipeline> pipeline_;
    std::unique_ptr<transport::Channel> trunk_;
    Generation expected_;
    std::atomic<std::uint64_t> n_tokens_ = 0;
    std::atomic<bool> stop_ = false;
    mutable std::mutex mutex_;
    std::string failure_;
    std::thread generator_;
};

}  // namespace k3::test
