// Writing packs: what an attempt leaves behind when it ends early, and what the next one makes of
// it.

#include "common/pack/pack_writer.h"

#include <doctest/doctest.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <string>

#include "tests/unit/common/pack/fixtures.h"

using namespace k3;
using namespace k3::pack;
using namespace k3::test;

namespace {

std::filesystem::path partial_of(std::filesystem::path path) { return path += ".partial"; }

/// Runs `attempt` in a process of its own and returns how that ended, as waitpid says.
template <typename Attempt>
int in_child(Attempt attempt) {
    const pid_t child = ::fork();
    REQUIRE(child >= 0);
    if (child == 0) ::_exit(attempt());
    int ended = 0;
    REQUIRE(::waitpid(child, &ended, 0) == child);
    return ended;
}

/// Writes the small pack in a process that is killed when it reports progress for the n-th time.
bool killed_at(int n, const std::filesystem::path& path) {
    const int ended = in_child([&] {
        int left = n;
        auto kill_me = [&left](std::uint64_t, std::uint64_t) {
            if (left-- == 0) ::raise(SIGKILL);
            return true;
        };
        return write_pack(small_plan(), path, small_source, kill_me).has_value() ? 0 : 1;
    });
    return WIFSIGNALED(ended);
}

}  // namespace

TEST_CASE("an attempt that is killed at any point is finished by the next, which keeps its work") {
    TempDir dir;
    write_small_pack(dir.path() / "whole");
    const std::string whole = read_file(dir.path() / "whole");
    const auto path = dir.path() / "killed";
    int n = 0;
    for (; killed_at(n, path); ++n) {
        CAPTURE(n);
        CHECK(std::filesystem::exists(path) == (n == 3));  // the last report comes after the rename
        if (n == 3) continue;
        CHECK_FALSE(read_all(partial_of(path)).has_value());
        auto written = write_pack(small_plan(), path, small_source, go_on);
        REQUIRE_MESSAGE(written.has_value(), written.error().sentence());
        // As many entries as were reported; each is one chunk here.
        std::uint64_t kept = 0;
        for (int i = 0; i < n; ++i) kept += small_plan().entries[i].stored_bytes();
        CHECK(written->kept_bytes == kept);
        CHECK(read_file(path) == whole);
        CHECK_FALSE(std::filesystem::exists(partial_of(path)));
        std::filesystem::remove(path);
        std::filesystem::remove(partial_of(path));
    }
    CHECK(n == 4);
}

TEST_CASE("whatever a crash made of the unfinished file, the finished one is the same") {
    TempDir dir;
    write_small_pack(dir.path() / "whole");
    const std::string whole = read_file(dir.path() / "whole");
    const auto path = dir.path() / "again";
    const auto partial = partial_of(path);
    REQUIRE(killed_at(2, path));
    const std::string left = read_file(partial);
    REQUIRE(left.size() == whole.size());
    auto check_after = [&](const std::string& crashed, std::uint64_t least_kept) {
        write_file(partial, crashed);
        auto written = write_pack(small_plan(), path, small_source, go_on);
        REQUIRE_MESSAGE(written.has_value(), written.error().sentence());
        CHECK(written->kept_bytes >= least_kept);
        CHECK(read_file(path) == whole);
        std::filesystem::remove(path);
    };
    for (std::size_t at = 2 * storage::kBlockBytes; at < left.size(); at += 4999) {
        CAPTURE(at);  // a piece that is recorded and wrong
        std::string crashed = left;
        crashed[at] ^= 1;
        check_after(crashed, storage::kBlockBytes);
    }
    const std::size_t checksums = format::checksums_offset(3);
    for (std::size_t at = checksums; at < checksums + 5 * 8; at += 9) {
        CAPTURE(at);  // a checksum that got lost or torn
        std::string crashed = left;
        crashed[at] ^= 1;
        check_after(crashed, storage::kBlockBytes);
    }
    for (const std::size_t size : {std::size_t{0}, std::size_t{100}, storage::kBlockBytes,
                                   2 * storage::kBlockBytes, left.size() - 1}) {
        CAPTURE(size);  // the file system lost its end
        check_after(left.substr(0, size), 0);
    }
    check_after(std::string(left.size(), '\0'), 0);
    check_after(whole, 8 * storage::kBlockBytes);  // complete, only without its name
}

TEST_CASE("Ctrl-C leaves the unfinished file, and says that it can go on") {
    TempDir dir;
    const auto path = dir.path() / "p";
    auto stop = [](std::uint64_t done, std::uint64_t) { return done < 30000; };
    auto written = write_pack(small_plan(), path, small_source, stop);
    REQUIRE_FALSE(written.has_value());
    CHECK(written.error().code == ErrorCode::cancelled);
    CHECK(contains(written.error().sentence(), "goes on"));
    CHECK(std::filesystem::exists(partial_of(path)));
    CHECK_FALSE(std::filesystem::exists(path));
}

TEST_CASE("a source that fails ends the attempt with its error") {
    TempDir dir;
    auto failing = [](const Entry& entry, std::uint64_t, std::span<std::byte>) -> Status {
        if (entry.key.layer == 0) return Status::ok();
        return Error{ErrorCode::corrupt, "a bad shard", ""};
    };
    auto written = write_pack(small_plan(), dir.path() / "p", failing, go_on);
    REQUIRE_FALSE(written.has_value());
    CHECK(written.error().message == "a bad shard");
}

TEST_CASE("two at a time do not write one file, and neither is an existing one replaced") {
    TempDir dir;
    const auto path = dir.path() / "p";
    std::string second;
    auto source = [&](const Entry& entry, std::uint64_t offset, std::span<std::byte> dst) {
        second = write_pack(small_plan(), path, small_source, go_on).error().message;
        return small_source(entry, offset, dst);
    };
    REQUIRE(write_pack(small_plan(), path, source, go_on).has_value());
    CHECK(contains(second, "is being written by another process"));
    CHECK(read_all(path).has_value());
    auto again = write_pack(small_plan(), path, small_source, go_on);
    REQUIRE_FALSE(again.has_value());
    CHECK(again.error().code == ErrorCode::invalid_argument);
    CHECK(contains(again.error().message, "already exists"));
}

TEST_CASE("an unfinished pack of something else is not written over") {
    TempDir dir;
    const auto path = dir.path() / "p";
    REQUIRE(killed_at(1, path));
    const std::string left = read_file(partial_of(path));
    PackPlan other = small_plan();
    SUBCASE("another checkpoint") { other.origin.fingerprint[0] = 'c'; }
    SUBCASE("another config") { other.origin.config_digest[0] = 'c'; }
    SUBCASE("another kind") { other.kind = Kind::experts; }
    SUBCASE("as many other entries") { other.entries[2].key = {4, 0}; }
    SUBCASE("fewer entries") { other.entries.pop_back(); }
    auto written = write_pack(other, path, small_source, go_on);
    REQUIRE_FALSE(written.has_value());
    CHECK(written.error().code == ErrorCode::incompatible);
    CHECK(contains(written.error().sentence(), "unfinished pack of another checkpoint"));
    CHECK(read_file(partial_of(path)) == left);
}

TEST_CASE("a disk without room is refused with both numbers, before anything is written") {
    TempDir dir;
    PackPlan plan = small_plan();
    plan.entries[2].bytes = std::uint64_t{1} << 55U;
    plan.entries[2].piece_bytes = plan.entries[2].bytes;
    auto written = write_pack(plan, dir.path() / "p", small_source, go_on);
    REQUIRE_FALSE(written.has_value());
    CHECK(written.error().code == ErrorCode::resource_exhausted);
    CHECK(contains(written.error().message,
                   std::to_string(file_bytes(plan)) + " bytes are to be written"));
    CHECK(contains(written.error().message, " are free"));
    CHECK(std::filesystem::is_empty(dir.path()));
}

TEST_CASE("a disk that becomes full in the middle is told, and the next attempt goes on") {
    TempDir dir;
    const auto path = dir.path() / "p";
    // The same errors come from a limit of file sizes, which a test can have without a disk.
    const int ended = in_child([&] {
        ::signal(SIGXFSZ, SIG_IGN);
        auto limit = [](const Entry& entry, std::uint64_t offset, std::span<std::byte> dst) {
            const rlimit bytes{entry.key.layer == 0 ? RLIM_INFINITY : 4096, RLIM_INFINITY};
            ::setrlimit(RLIMIT_FSIZE, &bytes);
            return small_source(entry, offset, dst);
        };
        auto written = write_pack(small_plan(), path, limit, go_on);
        const bool as_expected = !written.has_value() &&
                                 written.error().code == ErrorCode::resource_exhausted &&
                                 contains(written.error().sentence(), "no room for") &&
                                 contains(written.error().sentence(), "goes on from there");
        return as_expected ? 0 : 1;
    });
    CHECK(ended == 0);
    auto written = write_pack(small_plan(), path, small_source, go_on);
    REQUIRE_MESSAGE(written.has_value(), written.error().sentence());
    CHECK(written->kept_bytes == 7 * storage::kBlockBytes);
    CHECK(read_all(path).has_value());
}

TEST_CASE("a directory that is not there is refused") {
    auto written = write_pack(small_plan(), "/nonexistent/p", small_source, go_on);
    REQUIRE_FALSE(written.has_value());
    CHECK(written.error().code == ErrorCode::resource_exhausted);
    CHECK(contains(written.error().message, "cannot create /nonexistent/p.partial"));
}
