#include "bench/disk_limit.h"

#include <fmt/format.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>
#include <unistd.h>

#include <cerrno>
#include <fstream>
#include <system_error>

namespace k3::bench {

namespace fs = std::filesystem;

namespace {

constexpr const char* kRoot = "/sys/fs/cgroup/blkio";

Error no_limit(const std::string& why) {
    return Error{ErrorCode::io, fmt::format("reads cannot be limited by the kernel here: {}", why),
                 "run as root where blkio cgroups of version 1 are mounted"};
}

Status put_line(const fs::path& file, const std::string& text) {
    errno = 0;
    std::ofstream out(file);
    out << text;
    out.flush();
    if (out.good()) return Status::ok();
    return no_limit(fmt::format("{} refuses '{}': {}", file.string(), text,
                                std::generic_category().message(errno)));
}

/// "254:0" of the whole disk, which is what limits are for, where `path` lies on a part of one.
Result<std::string> disk_of(const fs::path& path) {
    struct stat status = {};
    if (::stat(path.c_str(), &status) != 0) return no_limit("there is no " + path.string());
    std::string device = fmt::format("{}:{}", major(status.st_dev), minor(status.st_dev));
    const fs::path block = fs::path("/sys/dev/block") / device;
    std::error_code absent;
    if (fs::exists(block / "partition", absent))
        std::getline(std::ifstream(block / ".." / "dev"), device);
    else if (!fs::exists(block, absent))
        return no_limit(fmt::format("{} lies on no block device", path.string()));
    return device;
}

}  // namespace

Result<std::unique_ptr<DiskLimit>> DiskLimit::create(const fs::path& path,
                                                     std::uint64_t bytes_per_s,
                                                     const std::string& name) {
    ASSIGN_OR_RETURN(const std::string disk, disk_of(path));
    const fs::path directory = fs::path(kRoot) / fmt::format("k3pipe-{}-{}", ::getpid(), name);
    std::error_code refused;
    if (!fs::create_directory(directory, refused))
        return no_limit(fmt::format("cannot make {}: {}", directory.string(), refused.message()));
    std::unique_ptr<DiskLimit> limit(new DiskLimit(directory));
    RETURN_IF_ERROR(put_line(directory / "blkio.throttle.read_bps_device",
                             fmt::format("{} {}", disk, bytes_per_s)));
    return limit;
}

DiskLimit::~DiskLimit() {
    std::error_code ignored;
    fs::remove(directory_, ignored);
}

Status DiskLimit::add(pid_t process) const {
    return put_line(directory_ / "cgroup.procs", std::to_string(process));
}

}  // namespace k3::bench
