#include "common/storage/read_pool.h"

#include <doctest/doctest.h>

#include <array>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <filesystem>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "common/base/memory_block.h"
#include "common/storage/read_probe.h"
#include "tests/support/checkpoint_copy.h"
#include "tests/support/text.h"

using namespace k3;
using storage::DirectFile;
using storage::kBlockBytes;
using storage::PoolRead;
using storage::ReadPool;
using storage::ReadShape;

namespace {

constexpr std::size_t kFileBlocks = 64;
constexpr ReadShape kOneThread{kBlockBytes, 1};

/// A file whose every block differs, and memory to read it into.
struct File {
    test::TempDir temp;
    std::string text;
    std::optional<DirectFile> file;
    MemoryBlock memory = MemoryBlock::create(kFileBlocks * kBlockBytes, "a test").value();

    explicit File(DirectFile::Mode mode = DirectFile::Mode::direct_if_possible) {
        for (std::size_t i = 0; text.size() < kFileBlocks * kBlockBytes; ++i)
            text += std::to_string(i) + " ";
        text.resize(kFileBlocks * kBlockBytes);
        test::write_file(path(), text);
        file.emplace(DirectFile::open(path(), mode).value());
    }
    std::filesystem::path path() const { return temp.path() / "weights"; }
    std::span<std::byte> blocks(std::size_t first, std::size_t n) {
        return memory.span().subspan(first * kBlockBytes, n * kBlockBytes);
    }
    bool has_read(std::size_t first, std::size_t n) {
        return std::memcmp(blocks(first, n).data(), text.data() + first * kBlockBytes,
                           n * kBlockBytes) == 0;
    }
};

/// The file as if stripes of two blocks lay on three devices.
class ThreeLanes final : public storage::ReadSource {
  public:
    explicit ThreeLanes(const DirectFile& file) : file_(file) {}
    storage::Lanes lanes() const noexcept override { return {3, 2 * kBlockBytes}; }
    std::uint64_t unit_bytes() const noexcept override { return kBlockBytes; }
    std::uint64_t end() const noexcept override { return file_.bytes(); }
    Status read(std::uint64_t offset, std::span<std::byte> dst) const override {
        const std::uint64_t last = offset + dst.size() - 1;
        if (lane_of(offset) == lane_of(last) && dst.size() <= 2 * kBlockBytes)
            return file_.read(offset, dst);
        return Error{ErrorCode::internal, "a request of two stripes", ""};
    }
    static std::uint64_t lane_of(std::uint64_t offset) { return offset / (2 * kBlockBytes) % 3; }

  private:
    const DirectFile& file_;
};

/// Holds requests back until it is opened.
class Gate {
  public:
    void open() {
        const std::lock_guard lock(mutex_);
        is_open_ = true;
        changed_.notify_all();
    }
    void pass() {
        std::unique_lock lock(mutex_);
        while (!is_open_) changed_.wait(lock);
    }

  private:
    std::mutex mutex_;
    std::condition_variable changed_;
    bool is_open_ = false;
};

}  // namespace

TEST_CASE("a read is cut into requests and complete when all of them are") {
    for (auto mode : {DirectFile::Mode::direct_if_possible, DirectFile::Mode::buffered}) {
        File f(mode);
        std::atomic<int> n_requests{0};
        ReadPool pool(
            {{4 * kBlockBytes, 3}, [&](const storage::ReadSource&, std::uint64_t, std::size_t) {
                 ++n_requests;
                 return Status::ok();
             }});
        PoolRead read;
        pool.start(read, *f.file, 0, f.blocks(0, kFileBlocks - 1));
        CHECK(pool.wait(read).has_value());
        CHECK(f.has_read(0, kFileBlocks - 1));
        CHECK(n_requests == 16);
        CHECK(pool.totals().bytes == (kFileBlocks - 1) * kBlockBytes);
        CHECK(pool.totals().busy_ns > 0);
    }
}

TEST_CASE("reads begin in the order in which they were started, urgent ones before") {
    File f;
    Gate gate;
    std::vector<std::uint64_t> begun;
    ReadPool pool({kOneThread, [&](const storage::ReadSource&, std::uint64_t offset, std::size_t) {
                       gate.pass();
                       begun.push_back(offset / kBlockBytes);
                       return Status::ok();
                   }});
    std::array<PoolRead, 4> reads;
    pool.start(reads[0], *f.file, 0, f.blocks(0, 2));
    pool.start(reads[1], *f.file, 5 * kBlockBytes, f.blocks(5, 1));
    pool.start(reads[2], *f.file, 9 * kBlockBytes, f.blocks(9, 1));
    pool.start(reads[3], *f.file, 20 * kBlockBytes, f.blocks(20, 1), ReadPool::Place::first);
    gate.open();
    for (PoolRead& read : reads) CHECK(pool.wait(read).has_value());
    // The first request may have begun before the urgent read came.
    const bool overtook_all = begun == std::vector<std::uint64_t>{20, 0, 1, 5, 9};
    const bool overtook_rest = begun == std::vector<std::uint64_t>{0, 20, 1, 5, 9};
    CHECK((overtook_all || overtook_rest));
}

TEST_CASE("a striped source is read whole, whatever begins and ends in the middle of a stripe") {
    File f;
    const ThreeLanes source(*f.file);
    for (const std::size_t request_blocks : {1U, 2U, 5U}) {
        ReadPool pool({{request_blocks * kBlockBytes, 2}, {}, 3});
        for (const auto& [first, n] : {std::pair<std::size_t, std::size_t>{0, kFileBlocks},
                                       {1, 1},
                                       {1, 2},
                                       {3, 20},
                                       {2, 2},
                                       {5, 3},
                                       {kFileBlocks - 1, 1}}) {
            CAPTURE(first);
            CAPTURE(n);
            std::memset(f.memory.span().data(), 0, f.memory.span().size());
            PoolRead read;
            pool.start(read, source, first * kBlockBytes, f.blocks(first, n));
            const Status status = pool.wait(read);
            REQUIRE_MESSAGE(status.has_value(), status.error().sentence());
            CHECK(f.has_read(first, n));
        }
        const ReadPool::Totals totals = pool.totals();
        CHECK(totals.lane_bytes[0] + totals.lane_bytes[1] + totals.lane_bytes[2] == totals.bytes);
        CHECK(totals.lane_bytes[2] > kFileBlocks / 4 * kBlockBytes);
    }
}

TEST_CASE("a device that is slow keeps the others of a striped source busy with reads ahead") {
    File f;
    const ThreeLanes source(*f.file);
    Gate gate;
    std::mutex mutex;
    std::condition_variable changed;
    std::size_t n_others = 0;
    ReadPool pool({{2 * kBlockBytes, 1},
                   [&](const storage::ReadSource&, std::uint64_t offset, std::size_t) {
                       if (ThreeLanes::lane_of(offset) == 1) {
                           gate.pass();
                       } else {
                           const std::lock_guard lock(mutex);
                           ++n_others;
                           changed.notify_all();
                       }
                       return Status::ok();
                   },
                   3});
    std::array<PoolRead, 2> reads;
    pool.start(reads[0], source, 0, f.blocks(0, 30));  // 15 stripes, 5 in each lane
    pool.start(reads[1], source, 30 * kBlockBytes, f.blocks(30, 30));
    {
        // All stripes of the other two lanes, of the second read too, while the first one waits.
        std::unique_lock lock(mutex);
        CHECK(changed.wait_for(lock, std::chrono::seconds(30), [&] { return n_others == 20; }));
    }
    gate.open();
    for (PoolRead& read : reads) CHECK(pool.wait(read).has_value());
    CHECK(f.has_read(0, 60));
}

TEST_CASE("an error in one lane ends the read, and one that was given up leaves nothing behind") {
    File f;
    const ThreeLanes source(*f.file);
    ReadPool pool({{2 * kBlockBytes, 1},
                   [&](const storage::ReadSource&, std::uint64_t offset, std::size_t) -> Status {
                       if (offset != 14 * kBlockBytes) return Status::ok();
                       return Error{ErrorCode::io, "lane 1 is on fire", ""};
                   },
                   3});
    PoolRead read;
    for (int i = 0; i < 3; ++i) {
        pool.start(read, source, 0, f.blocks(0, kFileBlocks));
        const Status failed = pool.wait(read);
        REQUIRE(!failed.has_value());
        CHECK(failed.error().message == "lane 1 is on fire");
        pool.start(read, source, 0, f.blocks(0, kFileBlocks));
        pool.cancel(read);
        pool.start(read, source, 0, f.blocks(0, 12));
        CHECK(pool.wait(read).has_value());
        CHECK(f.has_read(0, 12));
    }
}

TEST_CASE("an error ends its own read, and the read can be started again") {
    File f;
    std::atomic<bool> fails{true};
    std::atomic<int> n_requests{0};
    ReadPool pool(
        {kOneThread, [&](const storage::ReadSource&, std::uint64_t offset, std::size_t) -> Status {
             ++n_requests;
             if (!fails || offset != kBlockBytes) return Status::ok();
             return Error{ErrorCode::io, "the disk is on fire", ""};
         }});
    PoolRead bad;
    PoolRead good;
    pool.start(bad, *f.file, 0, f.blocks(0, 10));
    pool.start(good, *f.file, 20 * kBlockBytes, f.blocks(20, 1));
    const Status status = pool.wait(bad);
    REQUIRE(!status.has_value());
    CHECK(status.error().message == "the disk is on fire");
    CHECK(pool.wait(good).has_value());
    CHECK(n_requests == 3);  // what followed the error was dropped
    fails = false;
    pool.start(bad, *f.file, 0, f.blocks(0, 10));
    CHECK(pool.wait(bad).has_value());
    CHECK(f.has_read(0, 10));
}

TEST_CASE("a file that was cut names itself and the offset") {
    File f;
    std::filesystem::resize_file(f.path(), 8 * kBlockBytes);
    ReadPool pool({{2 * kBlockBytes, 2}, {}});
    PoolRead read;
    pool.start(read, *f.file, 6 * kBlockBytes, f.blocks(6, 4));
    const Status status = pool.wait(read);
    REQUIRE(!status.has_value());
    CHECK(status.error().code == ErrorCode::corrupt);
    CHECK(test::contains(status.error().message, f.path().string()));
    CHECK(test::contains(status.error().message, std::to_string(8 * kBlockBytes)));
}

TEST_CASE("a wait ends when it is told to, and what has not begun can be given up") {
    File f;
    Gate gate;
    std::atomic<int> n_requests{0};
    ReadPool pool({kOneThread, [&](const storage::ReadSource&, std::uint64_t, std::size_t) {
                       ++n_requests;
                       gate.pass();
                       return Status::ok();
                   }});
    PoolRead stuck;
    PoolRead queued;
    pool.start(stuck, *f.file, 0, f.blocks(0, 8));
    pool.start(queued, *f.file, 8 * kBlockBytes, f.blocks(8, 8));
    const Status status = pool.wait(stuck, [] { return true; });
    REQUIRE(!status.has_value());
    CHECK(status.error().code == ErrorCode::cancelled);
    pool.cancel(queued);
    gate.open();
    pool.cancel(stuck);
    CHECK(n_requests <= 8);  // none of the read that was given up while it was queued
    pool.start(queued, *f.file, 8 * kBlockBytes, f.blocks(8, 8));
    CHECK(pool.wait(queued).has_value());
    CHECK(f.has_read(8, 8));
}

TEST_CASE("a pool that ends drops what has not begun") {
    File f;
    PoolRead read;
    std::atomic<int> n_requests{0};
    Gate gate;
    {
        ReadPool pool({kOneThread, [&](const storage::ReadSource&, std::uint64_t, std::size_t) {
                           ++n_requests;
                           gate.pass();
                           return Status::ok();
                       }});
        pool.start(read, *f.file, 0, f.blocks(0, kFileBlocks));
        while (n_requests == 0) std::this_thread::yield();
        gate.open();
    }
    CHECK(n_requests <= static_cast<int>(kFileBlocks));
}

TEST_CASE("a rate is measured over the bytes that were read, around the end of the file") {
    File f;
    const auto rate = storage::measure_reads(*f.file, {2 * kBlockBytes, 2}, 60 * kBlockBytes,
                                             10 * kFileBlocks * kBlockBytes, 10.0);
    REQUIRE(rate.has_value());
    CHECK(rate->bytes >= 10 * kFileBlocks * kBlockBytes);
    CHECK(rate->bytes_per_s() > 0);
    // A small file says nothing about the device.
    const auto probe = storage::probe_reads(*f.file);
    REQUIRE(probe.has_value());
    CHECK(probe->shape == ReadShape{});
    CHECK(probe->bytes_per_s == 0);
}
