#include "launcher/doctor.h"

#include <doctest/doctest.h>

#include <algorithm>
#include <string>

#include "tests/support/checkpoint_copy.h"
#include "tests/support/golden.h"

using namespace k3;
using namespace k3::launcher;

namespace {

Diagnosis about(const std::vector<Diagnosis>& all, const std::string& subject) {
    const auto found = std::find_if(all.begin(), all.end(),
                                    [&](const Diagnosis& d) { return d.subject == subject; });
    REQUIRE(found != all.end());
    return *found;
}

/// A machine with this choice of huge pages and this much free memory in kB.
void make_machine(const std::filesystem::path& root, const std::string& pages,
                  const std::string& free_kib) {
    std::filesystem::create_directories(root / "proc");
    std::filesystem::create_directories(root / "sys/kernel/mm/transparent_hugepage");
    test::write_file(root / "proc/cpuinfo", "processor\t: 0\nmodel name\t: Test 9000\n");
    test::write_file(root / "proc/meminfo", "MemAvailable: " + free_kib + " kB\n");
    test::write_file(root / "sys/kernel/mm/transparent_hugepage/enabled", pages + "\n");
}

}  // namespace

TEST_CASE("what the machine has is told, and huge pages that are off come with the remedy") {
    test::TempDir root;
    make_machine(root.path(), "always [madvise] never", "2048");
    const std::vector<Diagnosis> good = examine_machine(root.path());
    CHECK(about(good, "processor").text.starts_with("Test 9000; "));
    CHECK(about(good, "memory").text.starts_with("2,097,152 bytes (2 MiB)"));
    CHECK(about(good, "huge pages").grade == Grade::fine);

    make_machine(root.path(), "always madvise [never]", "2048");
    const Diagnosis off = about(examine_machine(root.path()), "huge pages");
    CHECK(off.grade == Grade::advice);
    CHECK(off.remedy.find("transparent_hugepage/enabled") != std::string::npos);
}

TEST_CASE("every shard that is absent or short is named, and a whole checkpoint has none") {
    test::CheckpointCopy copy(test::demo_model_dir());
    CHECK(examine_shards(copy.path()).empty());
    copy.remove("model-00002-of-000003.safetensors");
    copy.truncate("model-00001-of-000003.safetensors", 50'000);
    copy.truncate("model-00003-of-000003.safetensors", 4);
    const std::vector<Diagnosis> found = examine_shards(copy.path());
    REQUIRE(found.size() == 3);
    CHECK(found[0].text == "1 of 3 shards are missing: 2");
    CHECK(found[0].code == ErrorCode::not_found);
    CHECK(found[1].text.find("model-00001-of-000003.safetensors") != std::string::npos);
    CHECK(found[1].code == ErrorCode::corrupt);
    CHECK(found[2].text.find("model-00003-of-000003.safetensors") != std::string::npos);
    for (const Diagnosis& diagnosis : found) CHECK(diagnosis.grade == Grade::failure);

    test::TempDir empty;
    REQUIRE(examine_shards(empty.path()).size() == 1);
    CHECK(examine_shards(empty.path()).front().code == ErrorCode::not_found);
}

TEST_CASE("more shards than files that may be open are a failure with the limit to set") {
    CHECK(examine_open_files(1).grade == Grade::fine);
    const Diagnosis many = examine_open_files(10'000'000);
    CHECK(many.grade == Grade::failure);
    CHECK(many.code == ErrorCode::resource_exhausted);
    CHECK(many.remedy == "ulimit -n 20000256");
}
