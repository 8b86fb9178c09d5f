#pragma once
// An expert server on a thread of the test process: real sockets and messages, LocalExperts behind.
// It can misbehave on request.

#include <atomic>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "common/kernels/kernel_table.h"
#include "common/model/load.h"
#include "common/transport/arena.h"
#include "common/transport/server.h"
#include "tests/support/checkpoint_copy.h"

namespace k3::test {

/// Endpoints in a directory that goes away with the test.
class SocketDirectory {
  public:
    std::string endpoint(const std::string& name) const {
        return "ipc://" + (folder_.path() / (name + ".sock")).string();
    }

  private:
    TempDir folder_;
};

class FakeExpertServer {
  public:
    struct Options {
        std::string endpoint = {};
        std::string name = "experts";
        std::string share = "all";
        std::uint32_t max_call_rows = 1024;
        std::uint32_t weight = 1;
        std::string fingerprint = {};  // empty: the model's
        bool use_shm = false;          // for replies, where the caller can read them
        bool starts_loading = false;   // until set_ready()
        std::string build = {};        // announced
        std::uint32_t lane_bytes = 0;  // of a slot of its fast lanes; 0: it has none
    };
    /// What happens instead of an answer to one call. `late`: it comes after kLateMs; `stuck`: the
    /// thread that computes hangs until the end, while the connection thread goes on.
    enum class Fault {
        none,
        drop,
        corrupt,
        bad_shape,
        wrong_body,
        stale_slot,
        stale_error,
        late,
        stuck,
    };
    static constexpr int kLateMs = 300;

    FakeExpertServer(const model::Model& model, Options options);
    ~FakeExpertServer();
    FakeExpertServer(const FakeExpertServer&) = delete;
    FakeExpertServer& operator=(const FakeExpertServer&) = delete;

    void set_ready();
    /// Asked for each call with its number, from 0; called on the server's thread.
    std::function<Fault(int call)> fault;
    /// Told of each call before it is answered.
    std::function<void(const msg::ExpertCall&)> on_call;

    /// Told of each hint.
    std::function<void(const msg::Prefetch&)> on_hint;

    std::atomic<int> n_calls{0};
    std::atomic<int> n_prefetches{0};
    std::atomic<int> n_shm_calls{0};    // rows came through shared memory
    std::atomic<int> n_shm_replies{0};  // sums went through it

  private:
    void serve();
    void answer(transport::Request request, const msg::ExpertCall& call);
    Result<std::vector<std::int64_t>> compute(const msg::ExpertCall& call,
                                              std::span<const float> rows);

    const model::Model& model_;
    Options options_;
    std::unique_ptr<transport::Arena> arena_;
    transport::ArenaReader reader_;
    std::unique_ptr<transport::Server> server_;
    std::atomic<bool> stop_{false};
    std::thread thread_;
};

}  // namespace k3::test
