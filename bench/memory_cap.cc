#include "bench/memory_cap.h"

#include <fmt/format.h>
#include <unistd.h>

#include <cerrno>
#include <fstream>
#include <string>
#include <system_error>
#include <utility>
#include <vector>

#include "common/base/memory.h"

namespace k3::bench {

namespace fs = std::filesystem;

namespace {

Error no_cap(const std::string& why) {
    return Error{ErrorCode::io, fmt::format("memory cannot be limited here: {}", why),
                 "run as root where cgroups can be made, or without --cap"};
}

/// A file of a cgroup takes what is written to it or fails the write.
Status put(const fs::path& file, const std::string& text) {
    errno = 0;
    std::ofstream out(file);
    out << text;
    out.flush();
    if (out.good()) return Status::ok();
    return no_cap(fmt::format("{} refuses '{}': {}", file.string(), text,
                              std::generic_category().message(errno)));
}

/// The number in a file; of its line that begins with `key` if that is not empty.
std::uint64_t number_in_file(const fs::path& file, const std::string& key) {
    std::ifstream in(file);
    for (std::string line; std::getline(in, line);)
        if (line.starts_with(key) && line.size() > key.size())
            return std::strtoull(line.c_str() + key.size(), nullptr, 10);
    return 0;
}

}  // namespace

Result<std::unique_ptr<MemoryCap>> MemoryCap::create(std::uint64_t bytes) {
    Error error = no_cap("/proc/self/cgroup names no group that counts memory");
    for (const MemoryCgroup& cgroup : memory_cgroups()) {
        const fs::path parent = cgroup.directory();
        const fs::path directory = parent / fmt::format("k3pipe-bench-{}", ::getpid());
        const char* limit = "memory.limit_in_bytes";
        if (cgroup.version == 2) {
            limit = "memory.max";
            // Refused where the controller is not available, as when version 1 has it.
            Status enabled = put(parent / "cgroup.subtree_control", "+memory");
            if (!enabled.has_value()) {
                error = std::move(enabled).error();
                continue;
            }
        }
        std::error_code refused;
        if (!fs::create_directory(directory, refused)) {
            error =
                no_cap(fmt::format("cannot make {}: {}", directory.string(), refused.message()));
            continue;
        }
        std::unique_ptr<MemoryCap> cap(new MemoryCap(cgroup.version, parent, directory));
        RETURN_IF_ERROR(put(directory / limit, std::to_string(bytes)));
        return cap;
    }
    return error;
}

Status MemoryCap::enter() const {
    return put(directory_ / "cgroup.procs", std::to_string(::getpid()));
}

Status MemoryCap::leave() const {
    return put(parent_ / "cgroup.procs", std::to_string(::getpid()));
}

MemoryCap::~MemoryCap() {
    std::vector<std::string> members;
    {
        std::ifstream in(directory_ / "cgroup.procs");
        for (std::string line; std::getline(in, line);) members.push_back(line);
    }
    for (const std::string& member : members) (void)put(parent_ / "cgroup.procs", member);
    std::error_code busy;
    fs::remove(directory_, busy);
}

std::uint64_t MemoryCap::peak_bytes() const {
    return number_in_file(
        directory_ / (version_ == 1 ? "memory.max_usage_in_bytes" : "memory.peak"), "");
}

std::uint64_t MemoryCap::n_killed() const {
    return number_in_file(directory_ / (version_ == 1 ? "memory.oom_control" : "memory.events"),
                          "oom_kill ");
}

}  // namespace k3::bench
