#pragma once
// The peer program as a child process.

#include <sys/types.h>

#include <optional>
#include <string>
#include <vector>

#include "common/base/fd.h"
#include "common/transport/channel.h"

namespace k3::transport::test {

class PeerProcess {
  public:
    /// Starts it on `endpoint` with a lifeline, and `extra` arguments. Its log goes to a pipe.
    explicit PeerProcess(const std::string& endpoint, const std::vector<std::string>& extra = {});
    ~PeerProcess();  // killed and reaped, if it still runs
    PeerProcess(const PeerProcess&) = delete;
    PeerProcess& operator=(const PeerProcess&) = delete;

    pid_t pid() const noexcept { return pid_; }
    void signal(int number) const;
    /// As the launcher's death does.
    void cut_lifeline() { lifeline_.reset(); }
    /// Its exit code, 128 + n for signal n; nothing if it still runs after `ms`.
    std::optional<int> wait_for_exit(std::int64_t ms);
    /// What it has logged; call after its end.
    std::string log();
    /// The name of its arena's segment.
    std::string segment() const;

  private:
    pid_t pid_ = -1;
    Fd lifeline_;
    Fd log_;
    std::optional<int> status_;
};

}  // namespace k3::transport::test
