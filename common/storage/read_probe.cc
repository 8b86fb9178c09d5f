#include "common/storage/read_probe.h"

#include <algorithm>
#include <array>
#include <chrono>

#include "common/base/memory_block.h"

namespace k3::storage {

namespace {

constexpr std::size_t kMiB = std::size_t{1} << 20;
constexpr std::size_t kReadBytes = 32 * kMiB;  // as the pieces of a stream
constexpr std::size_t kReads = 4;              // queued at a time
constexpr std::uint64_t kSmallFile = 512 * kMiB;

constexpr std::array kShapes = {ReadShape{}, ReadShape{16 * kMiB, 4}, ReadShape{32 * kMiB, 2},
                                ReadShape{4 * kMiB, 8}};
constexpr double kBetterBy = 1.25;
constexpr double kSecondsPerTry = 0.05;
constexpr int kRounds = 2;

}  // namespace

Result<ReadRate> measure_reads(const DirectFile& file, const ReadShape& shape, std::uint64_t offset,
                               std::uint64_t max_bytes, double max_seconds) {
    const std::uint64_t whole = block_floor(file.bytes());
    const auto read_bytes = static_cast<std::size_t>(
        block_floor(std::min<std::uint64_t>({kReadBytes, whole, max_bytes})));
    if (read_bytes == 0) return ReadRate{};
    ASSIGN_OR_RETURN(MemoryBlock memory, MemoryBlock::create(kReads * read_bytes, "reads"));
    std::array<PoolRead, kReads> reads;
    ReadPool pool({shape, {}});  // after what it fills
    std::uint64_t at = block_floor(offset % whole);
    const auto start = [&](std::size_t i) {
        if (at + read_bytes > whole) at = 0;
        pool.start(reads[i], file, at, memory.span().subspan(i * read_bytes, read_bytes));
        at += read_bytes;
    };
    const Clock::time_point begin = Clock::now();
    const auto seconds = [&] {
        return std::chrono::duration<double>(Clock::now() - begin).count();
    };
    for (std::size_t i = 0; i < kReads; ++i) start(i);
    ReadRate rate;
    for (std::size_t i = 0;; i = (i + 1) % kReads) {
        RETURN_IF_ERROR(pool.wait(reads[i]));
        rate = {pool.totals().bytes, seconds()};  // parts of the reads that follow count too
        if (rate.bytes >= max_bytes || rate.seconds >= max_seconds) break;
        start(i);
    }
    for (PoolRead& read : reads) pool.cancel(read);
    return rate;
}

Result<ReadProbe> probe_reads(const DirectFile& file) {
    if (!file.is_direct() || file.bytes() < kSmallFile) return ReadProbe{};
    std::array<double, kShapes.size()> best{};
    std::uint64_t offset = 0;
    // In turns: a neighbour that keeps the device busy for a moment hits all of them.
    for (int round = 0; round < kRounds; ++round) {
        for (std::size_t i = 0; i < kShapes.size(); ++i) {
            ASSIGN_OR_RETURN(const ReadRate rate,
                             measure_reads(file, kShapes[i], offset, kSmallFile, kSecondsPerTry));
            best[i] = std::max(best[i], rate.bytes_per_s());
            offset += rate.bytes;
        }
    }
    const auto fastest = static_cast<std::size_t>(
        std::distance(best.begin(), std::max_element(best.begin(), best.end())));
    const std::size_t chosen = best[fastest] > kBetterBy * best[0] ? fastest : 0;
    return ReadProbe{kShapes[chosen], best[chosen]};
}

}  // namespace k3::storage
