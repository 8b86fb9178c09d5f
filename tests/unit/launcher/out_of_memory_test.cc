#include "launcher/out_of_memory.h"

#include <doctest/doctest.h>

#include <filesystem>
#include <string>

#include "tests/support/checkpoint_copy.h"
#include "tests/support/text.h"

using namespace k3;
using namespace k3::launcher;

namespace {

void write(const std::filesystem::path& path, const std::string& text) {
    std::filesystem::create_directories(path.parent_path());
    k3::test::write_file(path, text);
}

}  // namespace

TEST_CASE("a kill for lack of memory is seen once, in either version of cgroups") {
    for (int version : {1, 2}) {
        CAPTURE(version);
        k3::test::TempDir dir;
        const std::filesystem::path root = dir.path();
        write(root / "proc/self/cgroup", version == 1 ? "4:cpu,memory:/box\n" : "0::/box\n");
        const std::filesystem::path file =
            root / (version == 1 ? "sys/fs/cgroup/memory/box/memory.oom_control"
                                 : "sys/fs/cgroup/box/memory.events");
        const std::string before =
            version == 1 ? "oom_kill_disable 0\nunder_oom 0\n" : "low 0\nhigh 5\nmax 7\noom 7\n";
        write(file, before + "oom_kill 3\n");
        OutOfMemoryWatch watch(root);
        CHECK_FALSE(watch.has_grown());
        write(file, before + "oom_kill 4\n");
        CHECK(watch.has_grown());
        CHECK_FALSE(watch.has_grown());
        CHECK(watch.explain() ==
              " by the kernel, which had no memory left: give it a smaller budget (cache_bytes, "
              "weights_bytes)");
        write(root / "proc/meminfo", "MemTotal: 4194304 kB\nMemAvailable: 1024 kB\n");
        CHECK(k3::test::contains(watch.explain(), "all of 4 GiB according to"));
        const std::filesystem::path limit =
            file.parent_path() / (version == 1 ? "memory.limit_in_bytes" : "memory.max");
        write(limit, "3221225472\n");
        write(file.parent_path() / (version == 1 ? "memory.usage_in_bytes" : "memory.current"),
              "3221221376\n");
        CHECK(k3::test::contains(watch.explain(),
                                 "all of 3 GiB according to " + limit.string() + " is taken"));
    }
}

TEST_CASE("inside a container the group of the mount counts, and without any nothing ever grows") {
    k3::test::TempDir dir;
    write(dir.path() / "proc/self/cgroup", "0::/seen/only/by/the/host\n");
    write(dir.path() / "sys/fs/cgroup/memory.events", "oom_kill 0\n");
    OutOfMemoryWatch watch(dir.path());
    write(dir.path() / "sys/fs/cgroup/memory.events", "oom_kill 1\n");
    CHECK(watch.has_grown());
    k3::test::TempDir nothing;
    CHECK_FALSE(OutOfMemoryWatch(nothing.path()).has_grown());
}
