#include "common/transport/ipc_listener.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/file.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "common/base/deadline.h"

namespace k3::transport {

namespace {

constexpr int kBacklog = 128;
constexpr std::int64_t kLockMs = 1000;

Error io_error(const std::string& path, int number) {
    std::string folder = path.substr(0, path.rfind('/') + 1);
    if (number == ENOENT || number == ENOTDIR)
        return {ErrorCode::io,
                "cannot listen on " + path + ": the directory " + (folder.empty() ? "." : folder) +
                    " does not exist",
                "create it or choose another path"};
    return {ErrorCode::io, "cannot listen on " + path + ": " + std::strerror(number),
            "check the permissions of the directory"};
}

Error taken(const std::string& path) {
    return {ErrorCode::resource_exhausted, path + " is taken by another process that listens there",
            "stop that process or choose another path"};
}

sockaddr_un address_of(const std::string& path) {
    sockaddr_un address{};
    address.sun_family = AF_UNIX;
    std::memcpy(address.sun_path, path.c_str(), path.size() + 1);
    return address;
}

int connect_or_bind(int (*function)(int, const sockaddr*, socklen_t), int fd,
                    const std::string& path) {
    sockaddr_un address = address_of(path);
    return function(fd, reinterpret_cast<const sockaddr*>(&address), sizeof(address));
}

/// Holds the directory's lock while it lives. Not getting it is no reason to fail: it only guards
/// against two services that start at the same instant.
Fd lock_folder(const std::string& path) {
    std::size_t slash = path.rfind('/');
    std::string folder = slash == std::string::npos ? "." : path.substr(0, slash + 1);
    Fd fd(::open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
    Deadline deadline = Deadline::after_ms(kLockMs);
    while (fd.valid() && ::flock(fd.get(), LOCK_EX | LOCK_NB) != 0 && !deadline.expired())
        ::poll(nullptr, 0, 2);
    return fd;
}

/// Removes a socket file that nobody listens on.
Status remove_stale(const std::string& path) {
    struct stat info {};
    if (::lstat(path.c_str(), &info) != 0)
        return errno == ENOENT ? Status::ok() : Status(io_error(path, errno));
    if (!S_ISSOCK(info.st_mode))
        return Error{ErrorCode::resource_exhausted,
                     path + " exists and is not a socket, so it is left alone",
                     "remove it or choose another path"};
    Fd probe(::socket(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
    if (!probe.valid()) return io_error(path, errno);
    if (connect_or_bind(::connect, probe.get(), path) == 0) return taken(path);
    if (errno == EAGAIN || errno == EINPROGRESS) return taken(path);  // alive, with a full backlog
    if (errno != ECONNREFUSED && errno != ENOENT) return io_error(path, errno);
    if (::unlink(path.c_str()) != 0 && errno != ENOENT) return io_error(path, errno);
    return {};
}

}  // namespace

IpcListener::~IpcListener() {
    struct stat info {};
    if (!path_.empty() && ::lstat(path_.c_str(), &info) == 0 && info.st_ino == inode_)
        ::unlink(path_.c_str());
}

Result<std::unique_ptr<IpcListener>> IpcListener::bind(const std::string& path) {
    std::unique_ptr<IpcListener> out(new IpcListener());
    out->fd_ = Fd(::socket(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
    if (!out->fd_.valid()) return io_error(path, errno);
    Fd lock = lock_folder(path);
    RETURN_IF_ERROR(remove_stale(path));
    if (connect_or_bind(::bind, out->fd_.get(), path) != 0)
        return errno == EADDRINUSE ? taken(path) : io_error(path, errno);
    struct stat info {};
    if (::lstat(path.c_str(), &info) == 0) out->inode_ = info.st_ino;
    out->path_ = path;
    out->exit_file_ = ExitFile(path);
    // Before anybody can connect: other users of the box stay out.
    if (::chmod(path.c_str(), 0600) != 0) return io_error(path, errno);
    if (::listen(out->fd_.get(), kBacklog) != 0) return io_error(path, errno);
    return out;
}

}  // namespace k3::transport
