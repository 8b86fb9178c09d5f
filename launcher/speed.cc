#include "launcher/speed.h"

#include <fmt/format.h>
#include <sys/stat.h>

#include <algorithm>
#include <atomic>
#include <limits>
#include <optional>
#include <thread>
#include <utility>

#include "common/base/deadline.h"
#include "common/base/memory_block.h"
#include "common/storage/direct_file.h"
#include "common/storage/read_probe.h"

namespace k3::launcher {

namespace {

using storage::DirectFile;

constexpr std::uint64_t kSmallFile = std::uint64_t{64} << 20U;
constexpr std::size_t kBlock = storage::kBlockBytes;

double seconds_since(Clock::time_point start) {
    return std::chrono::duration<double>(Clock::now() - start).count();
}

bool has_holes(const std::filesystem::path& path) {
    struct stat status = {};
    return ::stat(path.c_str(), &status) == 0 && status.st_blocks * 512 < status.st_size / 2;
}

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
                Result<MemoryBlock> memory = MemoryBlock::create(share, "a measurement");
                if (!memory.has_value()) {
                    ++n_ready;  // nobody waits for this one
                    return;
                }
                auto* words = reinterpret_cast<std::uint64_t*>(memory->data());
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
    std::optional<DirectFile> largest;
    for (const std::filesystem::path& path : files) {
        if (has_holes(path)) return {0, "not measured: the files are sparse"};
        auto file = DirectFile::open(path);
        if (!file.has_value()) return {0, "not measured: " + file.error().message};
        if (!largest || file->bytes() > largest->bytes()) largest = *std::move(file);
    }
    if (!largest || largest->bytes() < kSmallFile)
        return {0, "not measured: the files are too small"};
    const auto measure = [&]() -> Result<std::pair<storage::ReadShape, double>> {
        ASSIGN_OR_RETURN(const storage::ReadProbe probe, storage::probe_reads(*largest));
        ASSIGN_OR_RETURN(
            const storage::ReadRate rate,
            storage::measure_reads(*largest, probe.shape, 0,
                                   std::numeric_limits<std::uint64_t>::max(), seconds));
        return std::pair(probe.shape, rate.bytes_per_s());
    };
    const auto measured = measure();
    if (!measured.has_value()) return {0, "not measured: a read failed; see k3pipe doctor"};
    const auto& [shape, bytes_per_s] = *measured;
    return {bytes_per_s,
            fmt::format("measured: {} threads, {} reads of {} MiB", shape.n_threads,
                        largest->is_direct() ? "direct" : "buffered", shape.request_bytes >> 20U)};
}

}  // namespace k3::launcher
