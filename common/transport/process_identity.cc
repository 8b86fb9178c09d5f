#include "common/transport/process_identity.h"

#include <sys/stat.h>
#include <unistd.h>

#include <fstream>
#include <sstream>
#include <string>

namespace k3::transport {

namespace {

std::uint64_t own_pid_namespace() {
    struct stat info {};
    return ::stat("/proc/self/ns/pid", &info) == 0 ? info.st_ino : 0;
}

}  // namespace

std::optional<std::uint64_t> process_start_ticks(std::uint32_t pid) {
    std::ifstream file("/proc/" + std::to_string(pid) + "/stat");
    std::string line;
    if (!std::getline(file, line)) return std::nullopt;
    // "pid (command) state ...": the command may hold blanks and brackets, so start behind the
    // last.
    std::size_t end = line.rfind(')');
    if (end == std::string::npos) return std::nullopt;
    std::istringstream fields(line.substr(end + 1));
    std::string state;
    fields >> state;
    if (state == "Z" || state == "X") return std::nullopt;
    std::string skipped;
    for (int field = 4; field < 22; ++field) fields >> skipped;
    std::uint64_t ticks = 0;
    if (!(fields >> ticks)) return std::nullopt;
    return ticks;
}

ProcessIdentity ProcessIdentity::of_this_process() {
    auto pid = static_cast<std::uint32_t>(::getpid());
    return {pid, process_start_ticks(pid).value_or(0), own_pid_namespace()};
}

bool certainly_gone(const ProcessIdentity& process) {
    if (process.pid_namespace != own_pid_namespace()) return false;
    auto ticks = process_start_ticks(process.pid);
    return !ticks || *ticks != process.start_ticks;
}

}  // namespace k3::transport
