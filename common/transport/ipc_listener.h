#pragma once
// The listening unix socket of a service, bound before ZeroMQ sees it.
//
// ZeroMQ removes whatever lies at the path before it binds, so a second service would silently take
// the place of a first one that is alive. Here the path is bound without removing anything; only a
// file that nobody listens on any more is replaced. The check and the bind happen under a lock on
// the directory, so two services that start at once cannot both find it stale.

#include <cstdint>
#include <memory>
#include <string>

#include "common/base/fd.h"
#include "common/base/result.h"
#include "common/transport/exit_files.h"

namespace k3::transport {

class IpcListener {
  public:
    IpcListener(const IpcListener&) = delete;
    IpcListener& operator=(const IpcListener&) = delete;
    /// Removes the file if it is still the one that was made here.
    ~IpcListener();

    /// Errors: resource_exhausted (a process listens there, or the file is no socket), io
    /// (directory missing, no permission).
    static Result<std::unique_ptr<IpcListener>> bind(const std::string& path);

    /// The listening descriptor; its owner is the caller from now on.
    int release() noexcept { return fd_.release(); }

  private:
    IpcListener() = default;

    Fd fd_;
    std::string path_;
    std::uint64_t inode_ = 0;
    ExitFile exit_file_;
};

}  // namespace k3::transport
