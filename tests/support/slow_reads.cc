// Preloaded into a service (LD_PRELOAD): makes its larger reads from files as slow as a bad disk's.
//
//     K3_SLOW_READS_US=5000     microseconds that each of them takes longer

#include <sys/syscall.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

#include <cstdint>
#include <cstdlib>

namespace {

constexpr std::size_t kSmall = 8192;  // below it: headers and configs

void be_slow(std::size_t bytes) {
    const char* text = std::getenv("K3_SLOW_READS_US");
    if (text == nullptr || bytes < kSmall) return;
    ::usleep(static_cast<useconds_t>(std::strtoul(text, nullptr, 10)));
}

}  // namespace

extern "C" ssize_t pread64(int fd, void* dst, std::size_t bytes, off64_t offset) {
    be_slow(bytes);
    return ::syscall(SYS_pread64, fd, dst, bytes, offset);
}

extern "C" ssize_t preadv64(int fd, const iovec* parts, int n_parts, off64_t offset) {
    std::size_t bytes = 0;
    for (int i = 0; i < n_parts; ++i) bytes += parts[i].iov_len;
    be_slow(bytes);
    return ::syscall(SYS_preadv, fd, parts, n_parts, offset,
                     static_cast<std::uint64_t>(offset) >> 32U);
}
