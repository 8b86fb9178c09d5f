// A disk cache whose process is killed while it writes, again and again.

#include <doctest/doctest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <csignal>
#include <random>
#include <thread>
#include <vector>

#include "services/experts/disk_cache_store.h"
#include "tests/support/checkpoint_copy.h"
#include "tests/unit/services/experts/aligned_slot.h"
#include "tests/unit/services/experts/fake_store.h"

using namespace k3;
using namespace k3::experts;
using test::FakeStore;

namespace {

constexpr std::uint32_t kKillLayers = 4;
constexpr std::uint32_t kKillExperts = 24;
constexpr std::uint64_t kKillCapacity = 20;

DiskCacheStore::Options killed_options(const std::filesystem::path& directory) {
    DiskCacheStore::Options options;
    options.directory = directory;
    options.fingerprint = "0123456789abcdef0123456789abcdef";
    options.n_layers = kKillLayers;
    options.n_experts = kKillExperts;
    options.budget_bytes = DiskCacheStore::disk_bytes(options, FakeStore::kBytes, kKillCapacity);
    return options;
}

/// Reads, writes and evicts until it is killed.
[[noreturn]] void serve_until_killed(const std::filesystem::path& directory, unsigned seed) {
    FakeStore origin;
    auto store = DiskCacheStore::create(killed_options(directory), origin);
    if (!store.has_value()) ::_exit(1);
    test::AlignedSlot slot(**store);
    std::mt19937 random(seed);
    const auto below = [&](std::uint32_t n) { return static_cast<std::uint32_t>(random() % n); };
    while (true) {
        const std::uint32_t layer = below(kKillLayers);
        const ExpertUse use{below(kKillExperts), below(4)};
        (*store)->visit(layer, {&use, 1});
        const auto record = (*store)->read({layer, use.expert}, slot.span());
        if (!record.has_value() || !FakeStore::holds(*record, {layer, use.expert})) ::_exit(2);
    }
}

}  // namespace

TEST_CASE("killed 200 times while it writes, a disk cache never holds a wrong or half an entry") {
    const test::TempDir dir;
    const std::filesystem::path cache = dir.path() / "cache";
    std::mt19937 random(7);
    std::uint64_t n_entries = 0;
    for (unsigned round = 0; round < 200; ++round) {
        CAPTURE(round);
        const pid_t child = ::fork();
        REQUIRE(child >= 0);
        if (child == 0) serve_until_killed(cache, round);
        std::this_thread::sleep_for(std::chrono::microseconds(1000 + random() % 9000));
        REQUIRE(::kill(child, SIGKILL) == 0);
        int status = 0;
        REQUIRE(::waitpid(child, &status, 0) == child);
        REQUIRE(WIFSIGNALED(status));  // it never ended by itself: nothing it read was wrong

        auto files =
            DiskCacheFiles::open(cache, {killed_options(cache).fingerprint, FakeStore::kBytes});
        REQUIRE_MESSAGE(files.has_value(), (files.has_value() ? "" : files.error().sentence()));
        CHECK(files->repaired().empty());
        const auto keys = files->list();
        REQUIRE(keys.has_value());
        CHECK(keys->size() <= kKillCapacity);
        FakeStore origin;
        test::AlignedSlot slot(origin);
        for (const ExpertKey key : *keys) {
            const auto record = files->read(key, slot.span());
            REQUIRE_MESSAGE(record.has_value(),
                            (record.has_value() ? "" : record.error().sentence()));
            REQUIRE(FakeStore::holds(*record, key));
        }
        n_entries += keys->size();
    }
    MESSAGE(n_entries << " entries were there after 200 kills");
    CHECK(n_entries > 200);

    // And it is a cache as any other afterwards.
    FakeStore origin;
    auto store = DiskCacheStore::create(killed_options(cache), origin);
    REQUIRE(store.has_value());
    CHECK((*store)->disk_counts().entries > 0);
    test::AlignedSlot slot(**store);
    for (std::uint32_t expert = 0; expert < kKillExperts; ++expert) {
        const auto record = (*store)->read({1, expert}, slot.span());
        REQUIRE(record.has_value());
        CHECK(FakeStore::holds(*record, {1, expert}));
    }
    CHECK((*store)->disk_counts().damaged == 0);
    (*store)->wait_until_written();
    CHECK(!std::filesystem::exists(cache / "entry.tmp"));
}
