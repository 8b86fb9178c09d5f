// Preloaded into a service (LD_PRELOAD): makes its disk as slow as a bad one.
//
//     K3_SLOW_READS_US=5000     microseconds that each larger read takes longer
//     K3_READ_GATE=FILE         reads wait as long as this file is there
//     K3_SYNC_GATE=FILE         so does bringing a file to the disk
//     K3_SLOW_FILES=TEXT        all this only for files with TEXT in their path

#include <sys/syscall.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace {

constexpr std::size_t kSmall = 8192;  // below it: headers and configs

void wait_at(const char* variable) {
    const char* path = std::getenv(variable);
    while (path != nullptr && ::access(path, F_OK) == 0) ::usleep(1000);
}

bool is_slow(int fd) {
    const char* part = std::getenv("K3_SLOW_FILES");
    if (part == nullptr) return true;
    char link[64];
    char path[4096] = {};
    std::snprintf(link, sizeof(link), "/proc/self/fd/%d", fd);
    return ::readlink(link, path, sizeof(path) - 1) > 0 && std::strstr(path, part) != nullptr;
}

void be_slow(int fd, std::size_t bytes) {
    if (!is_slow(fd)) return;
    wait_at("K3_READ_GATE");
    const char* text = std::getenv("K3_SLOW_READS_US");
    if (text == nullptr || bytes < kSmall) return;
    ::usleep(static_cast<useconds_t>(std::strtoul(text, nullptr, 10)));
}

}  // namespace

extern "C" ssize_t pread64(int fd, void* dst, std::size_t bytes, off64_t offset) {
    be_slow(fd, bytes);
    return ::syscall(SYS_pread64, fd, dst, bytes, offset);
}

extern "C" ssize_t preadv64(int fd, const iovec* parts, int n_parts, off64_t offset) {
    std::size_t bytes = 0;
    for (int i = 0; i < n_parts; ++i) bytes += parts[i].iov_len;
    be_slow(fd, bytes);
    return ::syscall(SYS_preadv, fd, parts, n_parts, offset,
                     static_cast<std::uint64_t>(offset) >> 32U);
}

extern "C" int fsync(int fd) {
    if (is_slow(fd)) wait_at("K3_SYNC_GATE");
    return static_cast<int>(::syscall(SYS_fsync, fd));
}
