#pragma once
// A process beside the measured ones that is always busy and always gives way: a niced shell loop.

#include <sys/types.h>

namespace k3::bench {

/// Runs while this lives, on whatever cores this process may use.
class Neighbour {
  public:
    Neighbour();
    ~Neighbour();
    Neighbour(const Neighbour&) = delete;
    Neighbour& operator=(const Neighbour&) = delete;

    /// False if it could not be started.
    bool is_there() const noexcept { return pid_ > 0; }

  private:
    pid_t pid_ = -1;
};

}  // namespace k3::bench
