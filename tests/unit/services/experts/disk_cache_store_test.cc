// The disk cache: what it keeps, what it refuses, and that nothing on the disk makes a byte wrong.

#include "services/experts/disk_cache_store.h"

#include <doctest/doctest.h>
#include <fcntl.h>
#include <sched.h>
#include <sys/mount.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <csignal>
#include <functional>
#include <string>
#include <system_error>
#include <thread>
#include <vector>

#include "tests/support/checkpoint_copy.h"
#include "tests/support/text.h"
#include "tests/unit/services/experts/aligned_slot.h"
#include "tests/unit/services/experts/fake_store.h"

using namespace k3;
using namespace k3::experts;
using test::FakeStore;
namespace fs = std::filesystem;

namespace {

constexpr std::uint32_t kDiskExperts = 16;
constexpr std::uint64_t kEntry = 2 * 4096;  // a block of header, a block of record

DiskCacheStore::Options disk_options(const fs::path& directory, std::uint64_t capacity) {
    DiskCacheStore::Options options;
    options.directory = directory;
    options.fingerprint = "0123456789abcdef0123456789abcdef";
    options.n_layers = 6;
    options.n_experts = kDiskExperts;
    options.budget_bytes = DiskCacheStore::disk_bytes(options, FakeStore::kBytes, capacity);
    return options;
}

/// A disk cache over a store of its own, for one "run".
struct DiskCache {
    FakeStore origin;
    std::unique_ptr<DiskCacheStore> store;

    explicit DiskCache(const DiskCacheStore::Options& options) {
        auto made = DiskCacheStore::create(options, origin);
        REQUIRE_MESSAGE(made.has_value(), (made.has_value() ? "" : made.error().sentence()));
        store = std::move(made).value();
    }
    DiskCache(const fs::path& directory, std::uint64_t capacity)
        : DiskCache(disk_options(directory, capacity)) {}

    void read(ExpertKey key) const {
        test::AlignedSlot slot(*store);
        const auto record = store->read(key, slot.span());
        REQUIRE_MESSAGE(record.has_value(), (record.has_value() ? "" : record.error().sentence()));
        REQUIRE(FakeStore::holds(*record, key));
        store->wait_until_written();
    }
    void use(ExpertKey key, std::uint32_t rank = 0) const {
        const ExpertUse use{key.expert, rank};
        store->visit(key.layer, {&use, 1});
        read(key);
    }
    DiskCacheCounts counts() const { return store->disk_counts(); }
};

fs::path entry_path(const fs::path& directory, ExpertKey key) {
    return DiskCacheFiles::open(directory,
                                {disk_options(directory, 1).fingerprint, FakeStore::kBytes})
        ->path_of(key);
}

std::uint64_t bytes_on_disk(const fs::path& directory) {
    std::uint64_t blocks = 0;
    auto add = [&](const fs::path& path) {
        struct stat facts {};
        REQUIRE(::stat(path.c_str(), &facts) == 0);
        blocks += static_cast<std::uint64_t>(facts.st_blocks);
    };
    add(directory);
    for (const auto& entry : fs::directory_iterator(directory)) add(entry.path());
    return blocks * 512;
}

void flip(const fs::path& path, std::size_t at, unsigned bit = 0) {
    std::string bytes = test::read_file(path);
    REQUIRE(at < bytes.size());
    bytes[at] = static_cast<char>(bytes[at] ^ (1 << bit));
    test::write_file(path, bytes);
}

Error refused(const DiskCacheStore::Options& options) {
    FakeStore origin;
    auto store = DiskCacheStore::create(options, origin);
    REQUIRE(!store.has_value());
    return store.error();
}

}  // namespace

TEST_CASE("what came from the origin once comes from the disk, also in the next run") {
    const test::TempDir dir;
    {
        const DiskCache cache(dir.path() / "new" / "cache", 20);
        for (std::uint32_t expert = 0; expert < 10; ++expert) cache.use({1, expert});
        for (std::uint32_t expert = 0; expert < 10; ++expert) cache.use({1, expert});
        CHECK(cache.counts().misses == 10);
        CHECK(cache.counts().hits == 10);
        CHECK(cache.counts().writes == 10);
        CHECK(cache.origin.reads({1, 3}) == 1);
        // Of both, with what direct reads of whole entries take besides.
        CHECK(cache.store->counts().read_bytes == 20 * FakeStore::kBytes);
        CHECK(cache.store->counts().rounding_bytes == 10 * (kEntry - FakeStore::kBytes));
    }
    const DiskCache cache(dir.path() / "new" / "cache", 20);
    CHECK(cache.counts().entries == 10);
    for (std::uint32_t expert = 0; expert < 10; ++expert) cache.read({1, expert});
    CHECK(cache.counts().hits == 10);
    CHECK(cache.origin.reads({1, 3}) == 0);
}

TEST_CASE("an error of the origin is the caller's, and nothing of it is cached") {
    const test::TempDir dir;
    DiskCache cache(dir.path(), 20);
    cache.origin.fail({2, 2}, Error{ErrorCode::corrupt, "the scale is 255", "copy it again"});
    test::AlignedSlot slot(*cache.store);
    const auto record = cache.store->read({2, 2}, slot.span());
    REQUIRE(!record.has_value());
    CHECK(record.error().message == "the scale is 255");
    CHECK(cache.counts().entries == 0);
    cache.origin.heal({2, 2});
    cache.use({2, 2});
    CHECK(cache.counts().entries == 1);
}

TEST_CASE("the budget holds at every moment, bookkeeping included, and the valuable stay") {
    const test::TempDir dir;
    const DiskCacheStore::Options options = disk_options(dir.path(), 12);
    {
        const DiskCache cache(options);
        for (std::uint32_t round = 0; round < 60; ++round) {
            const std::vector<ExpertUse> often = {{0, 0}, {1, 1}, {2, 2}, {3, 3}};
            cache.store->visit(1, often);
            for (const ExpertUse& use : often) cache.read({1, use.expert});
            cache.use({2 + round % 4, round % kDiskExperts}, 12);
            REQUIRE(bytes_on_disk(dir.path()) <= options.budget_bytes);
        }
        CHECK(cache.counts().capacity == 12);
        CHECK(cache.counts().entries == 12);
        CHECK(cache.counts().evictions > 10);
        CHECK(cache.counts().refused == 0);
        CHECK(cache.origin.reads({1, 0}) == 1);
    }
    CHECK(fs::exists(dir.path() / "values"));
    // A smaller budget keeps what is worth most: the values are those of the run before.
    const DiskCacheStore::Options smaller = disk_options(dir.path(), 4);
    const DiskCache cache(smaller);
    CHECK(bytes_on_disk(dir.path()) <= smaller.budget_bytes);
    for (std::uint32_t expert = 0; expert < 4; ++expert) cache.read({1, expert});
    CHECK(cache.counts().hits == 4);
}

TEST_CASE("a budget below one entry is refused with the bytes it needs") {
    const test::TempDir dir;
    DiskCacheStore::Options options = disk_options(dir.path(), 1);
    CHECK(DiskCache(options).counts().capacity == 1);
    --options.budget_bytes;
    const Error error = refused(options);
    CHECK(error.code == ErrorCode::invalid_argument);
    CHECK(test::contains(error.sentence(), std::to_string(options.budget_bytes)));
    CHECK(test::contains(error.remedy, std::to_string(options.budget_bytes + 1)));
}

TEST_CASE("a damaged entry is dropped, counted and read from the origin") {
    const test::TempDir dir;
    const ExpertKey key{3, 5};
    DiskCache(dir.path(), 20).use(key);
    DiskCache(dir.path(), 20).use({3, 6});
    const fs::path path = entry_path(dir.path(), key);
    const std::string good = test::read_file(path);
    REQUIRE(good.size() == kEntry);

    std::vector<std::function<void()>> damages = {
        [&] { fs::remove(path); },
        [&] { test::write_file(path, ""); },
        [&] { test::write_file(path, good.substr(0, 4096)); },
        [&] { test::write_file(path, good.substr(0, good.size() - 1)); },
        [&] { test::write_file(path, good + "x"); },
        [&] { test::write_file(path, std::string(good.size(), '\0')); },
        [&] {
            test::write_file(path, test::read_file(entry_path(dir.path(), {3, 6})));
        },
    };
    for (std::size_t at = 0; at < 80; at += 3)
        damages.emplace_back([&, at] { flip(path, at, at % 8); });
    for (std::size_t at = 0; at < FakeStore::kBytes; at += 19)
        damages.emplace_back([&, at] { flip(path, 4096 + at, at % 8); });
    for (std::size_t i = 0; i < damages.size(); ++i) {
        CAPTURE(i);
        test::write_file(path, good);
        // Damaged while it lay there, or under a running server.
        if (i % 2 == 0) damages[i]();
        const DiskCache cache(dir.path(), 20);
        if (i % 2 == 1) damages[i]();
        cache.read(key);
        // A file that is gone before the start is just not there.
        const bool unseen = i == 0;
        CHECK(cache.counts().damaged == (unseen ? 0 : 1));
        CHECK(cache.origin.reads(key) == 1);
        cache.read(key);  // written again
        CHECK(cache.counts().hits == 1);
        CHECK(test::read_file(path) == good);
    }
}

TEST_CASE("a damaged list of values costs an order, not an entry") {
    const test::TempDir dir;
    for (const bool cut : {false, true}) {
        {
            const DiskCache cache(dir.path(), 20);
            cache.use({1, 1});
            cache.use({1, 2});
        }
        const fs::path values = dir.path() / "values";
        if (cut)
            fs::resize_file(values, fs::file_size(values) - 9);
        else
            flip(values, 80);
        const DiskCache cache(dir.path(), 20);
        CHECK(cache.counts().entries == 2);
        cache.read({1, 1});
        CHECK(cache.counts().hits == 1);
    }
}

TEST_CASE("the directory of another checkpoint is refused, and left as it is") {
    const test::TempDir dir;
    DiskCache(dir.path(), 20).use({1, 1});
    DiskCacheStore::Options other = disk_options(dir.path(), 20);
    other.fingerprint = "ffffffffffffffffffffffffffffffff";
    const Error error = refused(other);
    CHECK(error.code == ErrorCode::incompatible);
    CHECK(test::contains(error.sentence(), other.fingerprint));
    CHECK(test::contains(error.sentence(), "0123456789abcdef0123456789abcdef"));
    const DiskCache cache(dir.path(), 20);
    cache.read({1, 1});
    CHECK(cache.counts().hits == 1);
}

TEST_CASE("entries of another checkpoint are never taken, even if nothing says whose they are") {
    const test::TempDir dir;
    DiskCache(dir.path(), 20).use({1, 1});
    flip(dir.path() / "owner", 30);
    DiskCacheStore::Options other = disk_options(dir.path(), 20);
    other.fingerprint = "ffffffffffffffffffffffffffffffff";
    const DiskCache cache(other);  // told as a damaged directory
    cache.read({1, 1});
    CHECK(cache.counts().damaged == 1);
    CHECK(cache.origin.reads({1, 1}) == 1);
}

TEST_CASE("a directory with other things in it is refused and left as it is") {
    const test::TempDir dir;
    test::write_file(dir.path() / "letter.txt", "dear");
    const Error error = refused(disk_options(dir.path(), 20));
    CHECK(error.code == ErrorCode::incompatible);
    CHECK(test::contains(error.sentence(), "letter.txt"));
    CHECK(test::read_file(dir.path() / "letter.txt") == "dear");
    test::write_file(dir.path() / "file", "");
    CHECK(refused(disk_options(dir.path() / "file", 20)).code == ErrorCode::io);
}

TEST_CASE("two servers may not share a directory") {
    const test::TempDir dir;
    {
        const DiskCache first(dir.path(), 20);
        const Error error = refused(disk_options(dir.path(), 20));
        CHECK(error.code == ErrorCode::resource_exhausted);
        CHECK(test::contains(error.sentence(), dir.path().string()));
        CHECK(test::contains(error.sentence(), "in use by another expert server"));
    }
    CHECK(DiskCache(dir.path(), 20).counts().capacity == 20);
}

TEST_CASE("a write that fails leaves nothing behind and stops no reply") {
    // As a full disk fails: after some bytes.
    struct FileLimit {
        rlimit before{};
        FileLimit() {
            ::signal(SIGXFSZ, SIG_IGN);
            REQUIRE(::getrlimit(RLIMIT_FSIZE, &before) == 0);
        }
        void set(rlim_t bytes) const {
            const rlimit limit{bytes, before.rlim_max};
            REQUIRE(::setrlimit(RLIMIT_FSIZE, &limit) == 0);
        }
        ~FileLimit() {
            ::setrlimit(RLIMIT_FSIZE, &before);
            ::signal(SIGXFSZ, SIG_DFL);
        }
    };
    const test::TempDir dir;
    const DiskCache cache(dir.path(), 20);
    cache.use({1, 0});
    {
        const FileLimit limit;
        limit.set(4096);
        for (std::uint32_t expert = 1; expert < 8; ++expert) cache.use({1, expert});
        cache.read({1, 0});  // what is there goes on being of use
    }
    CHECK(cache.counts().hits == 1);
    CHECK(cache.counts().failed_writes == 1);  // and then it is left alone for a while
    CHECK(cache.counts().unwritten == 6);
    CHECK(cache.counts().entries == 1);
    CHECK(!fs::exists(dir.path() / "entry.tmp"));
}

TEST_CASE("a full disk and a read-only one are served through") {
    // A mount of this thread's own, and of those that it starts: it ends with the program.
    const test::TempDir dir;
    std::string why;
    std::thread([&] {
        if (::unshare(CLONE_NEWNS) != 0 ||
            ::mount("none", "/", nullptr, MS_REC | MS_PRIVATE, nullptr) != 0 ||
            ::mount("k3", dir.path().c_str(), "tmpfs", 0, "size=64k") != 0) {
            why = std::generic_category().message(errno);
            return;
        }
        {
            const DiskCache cache(dir.path(), 60);
            for (std::uint32_t expert = 0; expert < 16; ++expert) cache.use({1, expert});
            CHECK(cache.counts().failed_writes == 1);
            CHECK(cache.counts().writes >= 4);
            CHECK(cache.counts().entries == cache.counts().writes);
            for (std::uint32_t expert = 0; expert < 16; ++expert) cache.read({1, expert});
            CHECK(cache.counts().hits == cache.counts().writes);
        }
        // Space is found by forgetting, which needs none.
        CHECK(DiskCache(dir.path(), 2).counts().entries == 2);
        REQUIRE(::mount("none", dir.path().c_str(), nullptr, MS_REMOUNT | MS_RDONLY, nullptr) == 0);
        {
            const DiskCache cache(dir.path(), 2);
            for (std::uint32_t expert = 0; expert < 16; ++expert) cache.read({1, expert});
            CHECK(cache.counts().hits == 2);
            CHECK(cache.counts().damaged == 0);
        }
        // Without a cache in it, a directory that cannot be written to is an error at the start.
        CHECK(refused(disk_options(dir.path() / "none", 20)).code == ErrorCode::io);
        ::umount2(dir.path().c_str(), MNT_DETACH);
    }).join();
    if (!why.empty()) MESSAGE("NOT RUN: no file system of a test's own can be mounted: " << why);
}

TEST_CASE("many readers and few buffers: every byte is right and every record is accounted for") {
    const test::TempDir dir;
    const DiskCache cache(dir.path(), 24);
    std::vector<std::thread> threads;
    std::atomic<int> n_wrong{0};
    for (std::uint32_t t = 0; t < 4; ++t)
        threads.emplace_back([&, t] {
            test::AlignedSlot slot(*cache.store);
            for (std::uint32_t i = 0; i < 150; ++i) {
                const ExpertKey key{1 + (i * 7 + t) % 4, (i * 5 + t * 3) % kDiskExperts};
                const ExpertUse use{key.expert, i % 16};
                if (t == 0) cache.store->visit(key.layer, {&use, 1});
                const auto record = cache.store->read(key, slot.span());
                if (!record.has_value() || !FakeStore::holds(*record, key)) ++n_wrong;
            }
        });
    for (std::thread& thread : threads) thread.join();
    cache.store->wait_until_written();
    CHECK(n_wrong == 0);
    const DiskCacheCounts counts = cache.counts();
    CHECK(counts.hits + counts.misses == 600);
    CHECK(counts.damaged == 0);
    CHECK(counts.entries <= 24);
    CHECK(counts.entries ==
          static_cast<std::uint64_t>(std::count_if(
              fs::directory_iterator(dir.path()), fs::directory_iterator(),
              [](const auto& entry) { return entry.path().extension() == ".expert"; })));
}
