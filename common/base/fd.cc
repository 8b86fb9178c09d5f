#include "common/base/fd.h"

#include <unistd.h>

namespace k3 {

void Fd::reset() noexcept {
    if (fd_ >= 0) ::close(fd_);
    fd_ = -1;
}

}  // namespace k3
