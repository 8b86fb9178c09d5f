#pragma once
// Which process a number means. Process numbers are reused, so a number alone cannot tell whether
// the process that wrote it is still alive; together with its start time it can.

#include <cstdint>
#include <optional>

namespace k3::transport {

struct ProcessIdentity {
    std::uint32_t pid = 0;
    std::uint64_t start_ticks = 0;    // after boot, field 22 of /proc/<pid>/stat
    std::uint64_t pid_namespace = 0;  // inode of /proc/self/ns/pid: numbers differ between them

    static ProcessIdentity of_this_process();
};

/// When process `pid` started; nothing if there is none or it is only waiting to be reaped.
std::optional<std::uint64_t> process_start_ticks(std::uint32_t pid);

/// True only if the process is certainly gone: one of another namespace cannot be judged from here.
bool certainly_gone(const ProcessIdentity& process);

}  // namespace k3::transport
