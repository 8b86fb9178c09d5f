// Disks that fail under a running pipeline: the experts' files disappear, shrink, are slow or
// change. Whatever happens, a request ends with the tokens of an undisturbed one or with a clear
// error.

#include <doctest/doctest.h>
#include <signal.h>

#include <cstdlib>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include "tests/support/checkpoint_copy.h"
#include "tests/support/golden.h"
#include "tests/support/pipeline.h"

using namespace k3;
using namespace k3::test;
namespace fs = std::filesystem;

namespace {

/// So few experts fit memory that every token reads some: 8 slots, and two buffers of the disk
/// cache.
const std::string kSmallCache = "[experts]\ncache_bytes = \"160KiB\"\n";

msg::Submit some_request() {
    msg::Submit submit = of_ids({11, 48, 85, 122, 159}, 6);
    submit.ignore_eos = true;
    return submit;
}

/// Asked for before a case makes a world of its own.
const std::vector<std::uint32_t>& undisturbed() {
    static const std::vector<std::uint32_t> ids = [] {
        World world;
        Pipeline pipeline(world, "sound", golden_dir() / "tiny-k3", "");
        const Answer answer = pipeline.ask(some_request());
        REQUIRE_MESSAGE(!answer.error.has_value(), answer.error->sentence());
        REQUIRE(answer.ids.size() == 6);
        return answer.ids;
    }();
    return ids;
}

void check_ids(const Answer& answer, const std::vector<std::uint32_t>& wanted) {
    REQUIRE_MESSAGE(!answer.error.has_value(), answer.error->sentence());
    CHECK(answer.ids == wanted);
}

void flip_all_entries(const fs::path& cache) {
    std::size_t n_flipped = 0;
    for (const auto& entry : fs::directory_iterator(cache)) {
        if (entry.path().extension() != ".expert") continue;
        std::string bytes = read_file(entry.path());
        bytes[4096 + n_flipped * 131 % 9792] ^= 1;
        write_file(entry.path(), bytes);
        ++n_flipped;
    }
    REQUIRE(n_flipped > 20);
}

/// Experts that a request reads from the origin, past a disk cache; its tokens are checked.
std::uint64_t n_from_origin(const Pipeline& pipeline, const std::vector<std::uint32_t>& wanted) {
    const std::uint64_t before = pipeline.counter("disk_cache_misses", "experts");
    check_ids(pipeline.ask(some_request()), wanted);
    return pipeline.counter("disk_cache_misses", "experts") - before;
}

/// The address sanitizer wants to be the first library; the slow one does no harm before it.
std::string slowed_by(const std::string& us) {
    return "env = { LD_PRELOAD = \"" + built("tests/support/libk3_slow_disk.so").string() +
           "\", K3_SLOW_READS_US = \"" + us + "\", ASAN_OPTIONS = \"verify_asan_link_order=0\" }\n";
}

}  // namespace

TEST_CASE("a shard that is removed while it is served is served on") {
    const std::vector<std::uint32_t> wanted = undisturbed();
    World world;
    CheckpointCopy copy(golden_dir() / "tiny-k3");
    Pipeline pipeline(world, "removed", copy.path(), kSmallCache);
    for (int i = 1; i <= 5; ++i)
        copy.remove("model-0000" + std::to_string(i) + "-of-000005.safetensors");
    check_ids(pipeline.ask(some_request()), wanted);
}

TEST_CASE("a shard that is cut short while it is served ends requests by its name") {
    const std::vector<std::uint32_t> wanted = undisturbed();
    for (const std::string direct : {"auto", "off"}) {
        CAPTURE(direct);
        World world;
        CheckpointCopy copy(golden_dir() / "tiny-k3");
        Pipeline pipeline(world, "cut", copy.path(), kSmallCache + "direct = \"" + direct + "\"\n");
        check_ids(pipeline.ask(some_request()), wanted);
        const std::string shard = "model-00002-of-000005.safetensors";
        const std::string whole = read_file(copy.file(shard));
        copy.truncate(shard, 110'000);
        const Answer answer = pipeline.ask(some_request());
        REQUIRE(answer.error.has_value());
        CHECK(answer.error->code == ErrorCode::corrupt);
        CHECK(has(answer.error->message, copy.file(shard).string() + " ends early"));
        CHECK(has(answer.error->message, " expert "));
        CHECK(!answer.error->remedy.empty());
        // Nothing of it is left when the file is whole again.
        write_file(copy.file(shard), whole);
        check_ids(pipeline.ask(some_request()), wanted);
        CHECK(pipeline.stage("experts").restarts == 0);
    }
}

TEST_CASE("slow reads give the same tokens, and too slow ones an error that names the expert") {
    const std::vector<std::uint32_t> wanted = undisturbed();
    World world;
    {
        Pipeline pipeline(world, "slow", golden_dir() / "tiny-k3", kSmallCache + slowed_by("2000"));
        const Answer answer = pipeline.ask(some_request());
        check_ids(answer, wanted);
        CHECK(answer.seconds > 0.1);  // the reads of 10 positions were slow indeed
    }
    Pipeline pipeline(world, "stuck", golden_dir() / "tiny-k3",
                      kSmallCache + "read_wait_ms = 30\n" + slowed_by("300000"));
    const Answer answer = pipeline.ask(some_request());
    REQUIRE(answer.error.has_value());
    CHECK(answer.error->code == ErrorCode::deadline_exceeded);
    CHECK(has(answer.error->message, "was not read in time"));
    CHECK(has(answer.error->message, "expert "));
    CHECK(answer.ids.empty());
}

TEST_CASE("a disk cache makes up for a slow origin, also after its server was killed") {
    const std::vector<std::uint32_t> wanted = undisturbed();
    World world;
    const TempDir dir;
    const std::string cached = kSmallCache + "disk_cache = \"" + (dir.path() / "c").string() +
                               "\"\ndisk_cache_bytes = \"16MiB\"\n";
    const auto slow_origin = [](const std::string& us) {
        return "env = { LD_PRELOAD = \"" + built("tests/support/libk3_slow_disk.so").string() +
               "\", K3_SLOW_FILES = \".safetensors\", K3_SLOW_READS_US = \"" + us +
               "\", ASAN_OPTIONS = \"verify_asan_link_order=0\" }\n";
    };
    {
        Pipeline pipeline(world, "filling", golden_dir() / "tiny-k3", cached + slow_origin("2000"));
        check_ids(pipeline.ask(some_request()), wanted);
        REQUIRE(::kill(static_cast<pid_t>(pipeline.stage("experts").pid), SIGKILL) == 0);
        check_ids(pipeline.ask(some_request()), wanted);
        CHECK(pipeline.complete_again("experts", 1));
        // What found no buffer is written the next time.
        for (int i = 0; i < 30 && n_from_origin(pipeline, wanted) > 0; ++i) {
        }
    }
    Pipeline pipeline(world, "again", golden_dir() / "tiny-k3", cached + slow_origin("2000"));
    CHECK(n_from_origin(pipeline, wanted) == 0);
}

TEST_CASE("a disk cache whose every entry is damaged costs time and no token") {
    const std::vector<std::uint32_t> wanted = undisturbed();
    World world;
    const TempDir dir;
    const fs::path cache = dir.path() / "cache";
    const std::string stages =
        kSmallCache + "disk_cache = \"" + cache.string() + "\"\ndisk_cache_bytes = \"8MiB\"\n";
    {
        Pipeline pipeline(world, "filling", golden_dir() / "tiny-k3", stages);
        check_ids(pipeline.ask(some_request()), wanted);
        // While it runs.
        flip_all_entries(cache);
        check_ids(pipeline.ask(some_request()), wanted);
        CHECK(pipeline.program().says("read from the origin instead"));
    }
    flip_all_entries(cache);
    Pipeline pipeline(world, "again", golden_dir() / "tiny-k3", stages);
    check_ids(pipeline.ask(some_request()), wanted);
    CHECK(pipeline.program().says("does not have the checksum that it names"));
    check_ids(pipeline.ask(some_request()), wanted);
    CHECK(pipeline.stage("experts").restarts == 0);
    // A second server may not use it at the same time.
    const Ended second = world.k3pipe(
        {"run", "-c",
         world
             .write("second.toml", "[pipeline]\nmodel = \"" + (golden_dir() / "tiny-k3").string() +
                                       "\"\n" + stages)
             .string(),
         "--ids", "1,2", "--max-tokens", "1"});
    CHECK(second.code == 4);
    CHECK(has(second.sentence(), "in use by another expert server"));
}
