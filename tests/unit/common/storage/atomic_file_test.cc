// Files that are there as a whole or not at all: aborts, full disks, processes that are killed.

#include "common/storage/atomic_file.h"

#include <doctest/doctest.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <string>

#include "tests/support/checkpoint_copy.h"
#include "tests/support/text.h"

namespace k3::test {

namespace {

std::span<const std::byte> as_bytes(const std::string& text) {
    return std::as_bytes(std::span(text));
}

Status write_all(const std::filesystem::path& path, const std::string& text) {
    ASSIGN_OR_RETURN(storage::AtomicFile file, storage::AtomicFile::create(path, text.size()));
    RETURN_IF_ERROR(file.append(as_bytes(text)));
    return file.commit();
}

std::size_t n_files(const std::filesystem::path& directory) {
    std::size_t n = 0;
    for ([[maybe_unused]] const auto& entry : std::filesystem::directory_iterator(directory)) ++n;
    return n;
}

/// Runs `work` in a process of its own; returns how that ended.
template <typename Work>
int in_child(const Work& work) {
    const pid_t pid = ::fork();
    if (pid == 0) ::_exit(work() ? 0 : 1);
    int status = 0;
    REQUIRE(::waitpid(pid, &status, 0) == pid);
    return status;
}

}  // namespace

TEST_CASE("a committed file replaces the old one, is private, and leaves nothing beside it") {
    TempDir dir;
    const auto path = dir.path() / "file";
    write_file(path, "old");
    REQUIRE(write_all(path, "new content").has_value());
    CHECK(read_file(path) == "new content");
    CHECK(n_files(dir.path()) == 1);
    struct stat facts = {};
    REQUIRE(::stat(path.c_str(), &facts) == 0);
    CHECK((facts.st_mode & 0777U) == 0600U);
}

TEST_CASE("a file that is not committed leaves the old one") {
    TempDir dir;
    const auto path = dir.path() / "file";
    write_file(path, "old");
    {
        auto file = storage::AtomicFile::create(path, 100);
        REQUIRE(file.has_value());
        REQUIRE(file->append(as_bytes("half")).has_value());
        CHECK(n_files(dir.path()) == 2);
    }
    CHECK(read_file(path) == "old");
    CHECK(n_files(dir.path()) == 1);
    CHECK(storage::AtomicFile::create(dir.path() / "none" / "file", 1).error().code ==
          ErrorCode::not_found);
}

TEST_CASE("what a killed process left is removed by the next write, what a living one has is not") {
    TempDir dir;
    const auto path = dir.path() / "file";
    const int status = in_child([&] {
        auto file = storage::AtomicFile::create(path, 100);
        ::raise(SIGKILL);
        return file.has_value();
    });
    REQUIRE(WIFSIGNALED(status));
    CHECK(n_files(dir.path()) == 1);
    const std::string living = ".file." + std::to_string(::getppid()) + ".partial";
    for (const std::string& other : {living, std::string(".file.12x.partial"),
                                     std::string(".file.partial"), std::string("file.1.partial")})
        write_file(dir.path() / other, "x");
    REQUIRE(write_all(path, "whole").has_value());
    CHECK(read_file(path) == "whole");
    CHECK(n_files(dir.path()) == 5);
    CHECK(std::filesystem::exists(dir.path() / living));
}

TEST_CASE("only a file of the same kind is replaced, and no link to one") {
    TempDir dir;
    const auto path = dir.path() / "file";
    const auto is_replaceable = [&](const std::filesystem::path& file) {
        const Status checked = storage::check_replaceable(file, "magic ", "a file of ours");
        if (!checked.has_value())
            CHECK(contains(checked.error().message,
                           file.string() + " is there and not a file of ours"));
        return checked.has_value();
    };
    CHECK(is_replaceable(path));
    write_file(path, "magic 1");
    CHECK(is_replaceable(path));
    std::filesystem::create_symlink(path, dir.path() / "link");
    CHECK_FALSE(is_replaceable(dir.path() / "link"));
    for (const char* other : {"", "magic", "another 1"}) {
        write_file(path, other);
        CHECK_FALSE(is_replaceable(path));
    }
    CHECK_FALSE(is_replaceable(dir.path()));
    CHECK_FALSE(is_replaceable("/dev/null"));
}

TEST_CASE("no room is one sentence with both numbers, and the old file is still there") {
    TempDir dir;
    const auto path = dir.path() / "file";
    write_file(path, "old");
    const int status = in_child([&] {
        ::signal(SIGXFSZ, SIG_IGN);
        const rlimit limit = {1000, 1000};
        if (::setrlimit(RLIMIT_FSIZE, &limit) != 0) return false;
        const Status written = write_all(path, std::string(1001, 'x'));
        return !written.has_value() && written.error().code == ErrorCode::resource_exhausted &&
               contains(written.error().message, "1001 bytes are left to write") &&
               contains(written.error().message, path.string()) &&
               write_all(path, std::string(1000, 'y')).has_value() &&
               !write_all(path, std::string(5000, 'x')).has_value();
    });
    CHECK(WIFEXITED(status));
    CHECK(WEXITSTATUS(status) == 0);
    CHECK(read_file(path) == std::string(1000, 'y'));
    CHECK(n_files(dir.path()) == 1);
}

}  // namespace k3::test
