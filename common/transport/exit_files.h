#pragma once
// Files that must not outlive this process: its socket and its shared-memory segments.
//
// Destructors remove them on a clean end. When the end is forced (a second signal, a launcher that
// is gone while the compute thread is busy) no destructor runs, so the paths also stand in a
// table that a signal handler can walk: fixed memory, no locks, no allocation.

#include <cstddef>
#include <string>

namespace k3::transport {

/// Lists `path` for removal at a forced exit, while it lives. Does not remove it itself. Any
/// thread.
class ExitFile {
  public:
    ExitFile() = default;
    explicit ExitFile(const std::string& path) noexcept;
    ExitFile(ExitFile&& other) noexcept;
    ExitFile& operator=(ExitFile&& other) noexcept;
    ExitFile(const ExitFile&) = delete;
    ExitFile& operator=(const ExitFile&) = delete;
    ~ExitFile();

  private:
    static constexpr std::size_t kNone = ~std::size_t{0};
    std::size_t place_ = kNone;
};

/// Removes all listed files and ends the process. Async-signal-safe.
[[noreturn]] void exit_at_once(int code) noexcept;

}  // namespace k3::transport
