// available_memory against trees that look like /proc and /sys/fs/cgroup.

#include "common/base/memory.h"

#include <doctest/doctest.h>

#include <fstream>
#include <string>

#include "tests/support/checkpoint_copy.h"

using namespace k3;

namespace {

/// A root directory with 8 GiB available, to which limits are added.
struct FakeRoot {
    test::TempDir dir;
    FakeRoot() { put("proc/meminfo", "MemTotal: 16777216 kB\nMemAvailable:    8388608 kB\n"); }
    void put(const std::string& file, const std::string& text) {
        const auto path = dir.path() / file;
        std::filesystem::create_directories(path.parent_path());
        std::ofstream(path) << text;
    }
    AvailableMemory available() const {
        Result<AvailableMemory> result = available_memory(dir.path());
        REQUIRE(result.has_value());
        return *result;
    }
};

constexpr std::uint64_t kGib = std::uint64_t{1} << 30U;

}  // namespace

TEST_CASE("without a cgroup the machine's free memory counts") {
    FakeRoot root;
    CHECK(root.available().bytes == 8 * kGib);
    CHECK(root.available().limited_by.ends_with("proc/meminfo"));
}

TEST_CASE("a version 2 limit leaves what is not used, page cache counted as free") {
    FakeRoot root;
    root.put("proc/self/cgroup", "0::/job/step\n");
    root.put("sys/fs/cgroup/job/step/memory.max", "max\n");
    root.put("sys/fs/cgroup/job/step/memory.current", "100\n");
    root.put("sys/fs/cgroup/job/memory.max", std::to_string(4 * kGib) + "\n");
    root.put("sys/fs/cgroup/job/memory.current", std::to_string(3 * kGib) + "\n");
    root.put("sys/fs/cgroup/job/memory.stat",
             "anon 5\ninactive_file " + std::to_string(kGib) + "\nactive_file 7\n");
    CHECK(root.available().bytes == 2 * kGib);
    CHECK(root.available().limited_by.ends_with("job/memory.max"));
}

TEST_CASE("a version 1 limit counts too, and one above the machine's does not") {
    FakeRoot root;
    root.put("proc/self/cgroup", "7:cpu,cpuacct:/\n5:memory:/box\n");
    root.put("sys/fs/cgroup/memory/box/memory.limit_in_bytes", std::to_string(kGib));
    root.put("sys/fs/cgroup/memory/box/memory.usage_in_bytes", std::to_string(kGib / 4));
    root.put("sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712");
    root.put("sys/fs/cgroup/memory/memory.usage_in_bytes", "5");
    CHECK(root.available().bytes == kGib - kGib / 4);
}

TEST_CASE("the limit of all is the machine's memory or the smallest of the cgroups, used or not") {
    FakeRoot root;
    CHECK(memory_limit(root.dir.path())->bytes == 16 * kGib);
    root.put("proc/self/cgroup", "0::/job/step\n");
    root.put("sys/fs/cgroup/job/step/memory.max", std::to_string(5 * kGib) + "\n");
    root.put("sys/fs/cgroup/job/step/memory.current", "100\n");
    root.put("sys/fs/cgroup/job/memory.max", std::to_string(4 * kGib) + "\n");
    root.put("sys/fs/cgroup/job/memory.current", std::to_string(4 * kGib) + "\n");
    CHECK(memory_limit(root.dir.path())->bytes == 4 * kGib);
    CHECK(memory_limit(root.dir.path())->limited_by.ends_with("job/memory.max"));
    test::TempDir empty;
    CHECK(memory_limit(empty.path()).error().code == ErrorCode::io);
}

TEST_CASE("a group that only the host sees falls back to the one that is mounted") {
    FakeRoot root;
    root.put("proc/self/cgroup", "0::/host/only/path\n");
    root.put("sys/fs/cgroup/memory.max", std::to_string(kGib));
    root.put("sys/fs/cgroup/memory.current", std::to_string(2 * kGib));
    CHECK(root.available().bytes == 0);
}

TEST_CASE("a meminfo that is absent or says nothing is an error") {
    test::TempDir empty;
    Result<AvailableMemory> absent = available_memory(empty.path());
    REQUIRE(!absent.has_value());
    CHECK(absent.error().code == ErrorCode::io);
    FakeRoot root;
    root.put("proc/meminfo", "MemTotal: 5 kB\n");
    Result<AvailableMemory> silent = available_memory(root.dir.path());
    REQUIRE(!silent.has_value());
    CHECK(silent.error().code == ErrorCode::corrupt);
}

TEST_CASE("this process has some memory left") { CHECK(available_memory()->bytes > 0); }
