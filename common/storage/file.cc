#include "common/storage/file.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/uio.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <limits>
#include <system_error>

namespace k3::storage {

Error system_error(int error_number, std::string_view doing, const std::filesystem::path& path) {
    bool absent = error_number == ENOENT || error_number == ENOTDIR;
    return Error{absent ? ErrorCode::not_found : ErrorCode::io,
                 fmt::format("cannot {} {}: {}", doing, path.string(),
                             std::generic_category().message(error_number)),
                 absent ? "check the path, or finish copying the checkpoint"
                        : "check the file's permissions and the disk it lies on"};
}

Result<OpenFile> open_regular(const std::filesystem::path& path) {
    int fd = -1;
    do {
        // O_NONBLOCK: a named pipe in the place of a file must be refused below, not waited for.
        fd = ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    } while (fd < 0 && errno == EINTR);
    if (fd < 0) return system_error(errno, "open", path);
    OpenFile file{Fd(fd), 0};
    struct stat facts {};
    if (::fstat(fd, &facts) != 0) return system_error(errno, "inspect", path);
    if (!S_ISREG(facts.st_mode))
        return Error{ErrorCode::corrupt,
                     fmt::format("cannot read {}: not a regular file", path.string()),
                     "put the checkpoint's file there"};
    file.bytes = static_cast<std::uint64_t>(facts.st_size);
    return file;
}

Status check_checkpoint_directory(const std::filesystem::path& directory) {
    std::error_code error;
    std::filesystem::file_status found = std::filesystem::status(directory, error);
    if (std::filesystem::is_directory(found)) return Status::ok();
    std::string_view what = "is not a directory";
    if (found.type() == std::filesystem::file_type::not_found) what = "does not exist";
    if (found.type() == std::filesystem::file_type::none)
        return system_error(error.value(), "inspect", directory);
    return Error{ErrorCode::not_found,
                 fmt::format("checkpoint directory {} {}", directory.string(), what),
                 kNameCheckpoint};
}

Status read_exactly(int fd, std::uint64_t offset, std::span<std::byte> dst,
                    const std::filesystem::path& path) {
    return read_exactly(fd, offset, std::span<const std::span<std::byte>>(&dst, 1), path);
}

Status read_exactly(int fd, std::uint64_t offset, std::span<const std::span<std::byte>> parts,
                    const std::filesystem::path& path) {
    K3_CHECK(parts.size() <= kMaxParts, fmt::format("{} parts", parts.size()));
    std::array<iovec, kMaxParts> left{};
    std::size_t wanted = 0;
    for (std::size_t i = 0; i < parts.size(); ++i) {
        left[i] = {parts[i].data(), parts[i].size()};
        wanted += parts[i].size();
    }
    if (offset > static_cast<std::uint64_t>(std::numeric_limits<off_t>::max()) - wanted)
        return Error{
            ErrorCode::corrupt,
            fmt::format("{}: no file has {} bytes at offset {}", path.string(), wanted, offset),
            "copy the file again from its source"};
    std::size_t first = 0;
    std::size_t done = 0;
    while (done < wanted) {
        ssize_t got = ::preadv(fd, left.data() + first, static_cast<int>(parts.size() - first),
                               static_cast<off_t>(offset + done));
        if (got < 0 && errno == EINTR) continue;
        if (got < 0) {
            int reason = errno;
            return system_error(reason,
                                fmt::format("read {} bytes at offset {} of", wanted, offset), path);
        }
        if (got == 0)
            return Error{ErrorCode::corrupt,
                         fmt::format("{} ends early: wanted {} bytes at offset {}, got {}",
                                     path.string(), wanted, offset, done),
                         "copy the file again from its source"};
        done += static_cast<std::size_t>(got);
        auto skip = static_cast<std::size_t>(got);
        while (first < parts.size() && skip >= left[first].iov_len) skip -= left[first++].iov_len;
        if (skip > 0)
            left[first] = {static_cast<std::byte*>(left[first].iov_base) + skip,
                           left[first].iov_len - skip};
    }
    return Status::ok();
}

Status write_exactly(int fd, std::uint64_t offset, std::span<const std::byte> bytes,
                     const std::filesystem::path& path) {
    while (!bytes.empty()) {
        const ssize_t n = ::pwrite(fd, bytes.data(), bytes.size(), static_cast<off_t>(offset));
        if (n < 0 && errno == EINTR) continue;
        if (n < 0) return write_error(errno, path, bytes.size());
        bytes = bytes.subspan(static_cast<std::size_t>(n));
        offset += static_cast<std::uint64_t>(n);
    }
    return Status::ok();
}

Status sync_directory(const std::filesystem::path& directory) {
    const Fd fd(::open(directory.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
    if (!fd.valid() || ::fsync(fd.get()) != 0) return system_error(errno, "sync", directory);
    return Status::ok();
}

Result<std::uint64_t> free_disk_bytes(const std::filesystem::path& path) {
    struct statvfs disk = {};
    if (::statvfs(path.c_str(), &disk) != 0)
        return system_error(errno, "look at the disk of", path);
    return std::uint64_t{disk.f_bavail} * disk.f_frsize;
}

Error write_error(int error_number, const std::filesystem::path& path, std::uint64_t bytes) {
    if (error_number != ENOSPC && error_number != EDQUOT && error_number != EFBIG)
        return system_error(error_number, "write", path);
    const std::filesystem::path directory = path.has_parent_path() ? path.parent_path() : ".";
    const Result<std::uint64_t> free = free_disk_bytes(directory);
    return Error{ErrorCode::resource_exhausted,
                 fmt::format("no room for {}: {} bytes are to be written, and {} are free ({})",
                             path.string(), bytes, free ? *free : 0,
                             std::generic_category().message(error_number)),
                 "free disk space or choose another directory"};
}

Result<std::string> read_text_file(const std::filesystem::path& path, std::uint64_t max_bytes) {
    ASSIGN_OR_RETURN(OpenFile file, open_regular(path));
    if (file.bytes > max_bytes)
        return Error{ErrorCode::corrupt,
                     fmt::format("{} has {} bytes, more than the {} such a file may have",
                                 path.string(), file.bytes, max_bytes),
                     "check that it is the file it should be"};
    std::string text(file.bytes, '\0');
    RETURN_IF_ERROR(
        read_exactly(file.fd.get(), 0, std::as_writable_bytes(std::span<char>(text)), path));
    return text;
}

}  // namespace k3::storage
