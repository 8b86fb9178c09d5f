#include "common/storage/atomic_file.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <cerrno>
#include <charconv>
#include <string>
#include <system_error>
#include <utility>

#include "common/base/check.h"
#include "common/storage/file.h"

namespace k3::storage {

namespace fs = std::filesystem;

namespace {

constexpr std::string_view kPartial = ".partial";

/// ".NAME." in front of the process id.
std::string partial_prefix(const fs::path& path) {
    return fmt::format(".{}.", path.filename().string());
}

fs::path directory_of(const fs::path& path) {
    return path.has_parent_path() ? path.parent_path() : fs::path(".");
}

/// The process that writes `name` in place of the file with this prefix; 0: it is another file.
pid_t writer_of(std::string_view name, std::string_view prefix) {
    if (!name.starts_with(prefix) || !name.ends_with(kPartial)) return 0;
    if (name.size() < prefix.size() + kPartial.size()) return 0;
    name.remove_prefix(prefix.size());
    name.remove_suffix(kPartial.size());
    pid_t pid = 0;
    const auto [end, code] = std::from_chars(name.data(), name.data() + name.size(), pid);
    return code == std::errc{} && end == name.data() + name.size() ? pid : 0;
}

/// What was killed in the middle of writing `path` left its part behind.
void sweep(const fs::path& path) {
    const std::string prefix = partial_prefix(path);
    std::error_code error;
    for (fs::directory_iterator at(directory_of(path), error), end; !error && at != end;
         at.increment(error)) {
        const pid_t pid = writer_of(at->path().filename().string(), prefix);
        if (pid > 0 && ::kill(pid, 0) != 0 && errno == ESRCH) ::unlink(at->path().c_str());
    }
}

/// No room for a write: a full disk, a quota, or a limit of the file's size.
bool is_full(int error_number) {
    return error_number == ENOSPC || error_number == EDQUOT || error_number == EFBIG;
}

}  // namespace

Result<AtomicFile> AtomicFile::create(const fs::path& path, std::uint64_t bytes, mode_t mode) {
    sweep(path);
    fs::path partial =
        directory_of(path) / fmt::format("{}{}{}", partial_prefix(path), ::getpid(), kPartial);
    const int flags = O_WRONLY | O_CREAT | O_TRUNC | O_NOFOLLOW | O_CLOEXEC;
    Fd fd(::open(partial.c_str(), flags, mode));
    if (!fd.valid()) return system_error(errno, "create", partial);
    AtomicFile file(path, std::move(partial), std::move(fd), bytes);
    // File systems that cannot reserve find out while writing. The size stays that of what is
    // written, so that a part never begins with zeros that nobody wrote.
    rlimit limit = {};
    if (::getrlimit(RLIMIT_FSIZE, &limit) == 0 && limit.rlim_cur < bytes)
        return file.failed(EFBIG, "write");
    if (bytes > 0 &&
        ::fallocate(file.fd_.get(), FALLOC_FL_KEEP_SIZE, 0, static_cast<off_t>(bytes)) != 0 &&
        is_full(errno))
        return file.failed(errno, "write");
    return file;
}

AtomicFile::AtomicFile(AtomicFile&& other) noexcept
    : path_(std::move(other.path_)),
      partial_(std::exchange(other.partial_, {})),
      fd_(std::move(other.fd_)),
      left_bytes_(other.left_bytes_) {}

AtomicFile::~AtomicFile() {
    if (!partial_.empty()) ::unlink(partial_.c_str());
}

Status AtomicFile::append(std::span<const std::byte> bytes) {
    K3_CHECK(bytes.size() <= left_bytes_, path_.string());
    while (!bytes.empty()) {
        const ssize_t n = ::write(fd_.get(), bytes.data(), bytes.size());
        if (n < 0 && errno == EINTR) continue;
        if (n < 0) return failed(errno, "write");
        bytes = bytes.subspan(static_cast<std::size_t>(n));
        left_bytes_ -= static_cast<std::uint64_t>(n);
    }
    return Status::ok();
}

Status AtomicFile::commit() {
    K3_CHECK(left_bytes_ == 0, fmt::format("{}: {} bytes", path_.string(), left_bytes_));
    if (::fsync(fd_.get()) != 0) return failed(errno, "write");
    if (::rename(partial_.c_str(), path_.c_str()) != 0) return failed(errno, "replace");
    partial_.clear();
    // The name is only then sure to be on the disk when its directory is.
    const Fd directory(::open(directory_of(path_).c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
    if (directory.valid() && ::fsync(directory.get()) != 0) return failed(errno, "write");
    return Status::ok();
}

Error AtomicFile::failed(int error_number, std::string_view doing) const {
    if (!is_full(error_number)) return system_error(error_number, doing, path_);
    struct statvfs disk = {};
    const std::uint64_t free = ::statvfs(directory_of(path_).c_str(), &disk) == 0
                                   ? std::uint64_t{disk.f_bavail} * disk.f_frsize
                                   : 0;
    return Error{ErrorCode::resource_exhausted,
                 fmt::format("no room for {}: {} bytes are left to write and {} are free{}",
                             path_.string(), left_bytes_, free,
                             error_number == EFBIG ? ", but files may not grow so large" : ""),
                 error_number == EFBIG ? "raise the limit of file sizes (ulimit -f)"
                                       : "free disk space or choose another directory"};
}

Status check_replaceable(const fs::path& path, std::string_view magic, std::string_view kind) {
    std::error_code error;
    const fs::file_type type = fs::symlink_status(path, error).type();
    if (type == fs::file_type::not_found) return Status::ok();
    if (type == fs::file_type::regular) {
        const Fd fd(::open(path.c_str(), O_RDONLY | O_NOFOLLOW | O_CLOEXEC));
        std::string begin(magic.size(), '\0');
        if (fd.valid() &&
            read_exactly(fd.get(), 0, std::as_writable_bytes(std::span(begin)), path) &&
            begin == magic)
            return Status::ok();
    }
    return Error{ErrorCode::invalid_argument,
                 fmt::format("{} is there and not {}, so it is not replaced", path.string(), kind),
                 "choose another name, or remove it"};
}

Status replace_file(const fs::path& path, std::string_view bytes, mode_t mode) {
    ASSIGN_OR_RETURN(AtomicFile file, AtomicFile::create(path, bytes.size(), mode));
    RETURN_IF_ERROR(file.append(std::as_bytes(std::span(bytes))));
    return file.commit();
}

void sweep_partial_files(
    const fs::path& directory,
    const std::function<bool(const std::string& name, const fs::path& partial)>& is_ours) {
    std::error_code error;
    for (fs::directory_iterator at(directory, error), end; !error && at != end;
         at.increment(error)) {
        const std::string part = at->path().filename().string();
        if (!part.starts_with('.') || !part.ends_with(kPartial)) continue;
        // ".NAME.PID.partial"
        const std::size_t before_pid = part.rfind('.', part.size() - kPartial.size() - 1);
        if (before_pid == std::string::npos || before_pid < 2) continue;
        const pid_t pid = writer_of(part, part.substr(0, before_pid + 1));
        const bool is_gone = pid == ::getpid() || (::kill(pid, 0) != 0 && errno == ESRCH);
        if (pid > 0 && is_gone && is_ours(part.substr(1, before_pid - 1), at->path()))
            ::unlink(at->path().c_str());
    }
}

}  // namespace k3::storage
