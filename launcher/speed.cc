#include "launcher/speed.h"

#include <fmt/format.h>
#include <sys/stat.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <memory>
#include <span>
#include <thread>

#include "common/base/deadline.h"
#include "common/base/memory.h"
#include "common/storage/direct_file.h"

namespace k3::launcher {

namespace {

using storage::DirectFile;

constexpr std::size_t kReaders = 4;
constexpr std::size_t kRequestBytes = std::size_t{4} << 20U;
constexpr std::uint64_t kSmallFile = std::uint64_t{64} << 20U;
constexpr std::size_t kBlock = storage::kBlockBytes;

struct FreeMemory {
    void operator()(std::byte* memory) const noexcept { std::free(memory); }
};
using Memory = std::unique_ptr<std::byte, FreeMemory>;

Memory take_blocks(std::size_t bytes) {
    return Memory(static_cast<std::byte*>(std::aligned_alloc(kBlock, bytes)));
}

double seconds_since(Clock::time_point start) {
    return std::chrono::duration<double>(Clock::now() - start).count();
}

bool has_holes(const std::filesystem::path& path) {
    struct stat status = {};
    return ::stat(path.c_str(), &status) == 0 && status.st_blocks * 512 < status.st_size / 2;
}

/// Hands out requests that wander over all files, each file front to back.
class Requests {
  public:
    explicit Requests(const std::vector<DirectFile>& files) : files_(files) {}

    struct Request {
        const DirectFile* file;
        std::uint64_t offset;
    };
    Request next() {
        const std::uint64_t number = next_++;
        const DirectFile& file = files_[number % files_.size()];
        const std::uint64_t places = file.bytes() / kRequestBytes;
        return {&file, number / files_.size() % places * kRequestBytes};
    }

  private:
    const std::vector<DirectFile>& files_;
    std::atomic<std::uint64_t> next_{0};
};

}  // namespace

Speed measure_memory(std::size_t n_threads, std::size_t n_bytes, double seconds) {
    const std::size_t share = n_bytes / n_threads / kBlock * kBlock;
    std::atomic<std::uint64_t> n_read{0};
    std::atomic<std::uint64_t> sink{0};  // so that the sums are not thrown away
    std::atomic<std::size_t> n_ready{0};
    std::vector<double> times(n_threads);
    {
        std::vector<std::jthread> threads;
        for (std::size_t t = 0; t < n_threads; ++t)
            threads.emplace_back([&, t] {
                Memory memory = take_blocks(share);
                if (memory == nullptr) {
                    ++n_ready;  // nobody waits for this one
                    return;
                }
                prefer_huge_pages({memory.get(), share});
                auto* words = reinterpret_cast<std::uint64_t*>(memory.get());
                const std::size_t n_words = share / sizeof(*words);
                std::fill(words, words + n_words, t);
                ++n_ready;
                while (n_ready < n_threads) std::this_thread::yield();
                const Clock::time_point start = Clock::now();
                std::uint64_t sum = 0;
                do {
                    for (std::size_t i = 0; i < n_words; i += 8)
                        for (std::size_t j = 0; j < 8; ++j) sum += words[i + j];
                    n_read += share;
                } while (seconds_since(start) < seconds);
                times[t] = seconds_since(start);
                sink += sum;
            });
    }
    const double longest = *std::max_element(times.begin(), times.end());
    return {longest > 0 ? static_cast<double>(n_read) / longest : 0,
            fmt::format("measured: {} thread{}", n_threads, n_threads == 1 ? "" : "s")};
}

Speed measure_disk(const std::vector<std::filesystem::path>& files, double seconds) {
    std::vector<DirectFile> opened;
    std::string why_buffered;
    for (const std::filesystem::path& path : files) {
        if (has_holes(path)) return {0, "not measured: the files are sparse"};
        auto file = DirectFile::open(path);
        if (!file.has_value()) return {0, "not measured: " + file.error().message};
        if (file->bytes() < kSmallFile) continue;
        if (!file->is_direct()) why_buffered = file->why_buffered();
        opened.push_back(*std::move(file));
    }
    if (opened.empty()) return {0, "not measured: the files are too small"};
    Requests requests(opened);
    std::atomic<std::uint64_t> n_bytes{0};
    std::atomic<bool> failed{false};
    const Clock::time_point start = Clock::now();
    {
        std::vector<std::jthread> threads;
        for (std::size_t t = 0; t < kReaders; ++t)
            threads.emplace_back([&] {
                Memory memory = take_blocks(kRequestBytes);
                while (memory != nullptr && !failed && seconds_since(start) < seconds) {
                    const Requests::Request request = requests.next();
                    const std::span<std::byte> buffer(memory.get(), kRequestBytes);
                    if (!request.file->read(request.offset, buffer).has_value()) failed = true;
                    n_bytes += kRequestBytes;
                }
            });
    }
    if (failed) return {0, "not measured: a read failed; see k3pipe doctor"};
    return {static_cast<double>(n_bytes) / seconds_since(start),
            fmt::format("measured: {} threads, {} reads of {} MiB", kReaders,
                        why_buffered.empty() ? "direct" : "buffered", kRequestBytes >> 20U)};
}

}  // namespace k3::launcher
