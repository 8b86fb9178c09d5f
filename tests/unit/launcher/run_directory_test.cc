#include "launcher/run_directory.h"

#include <doctest/doctest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <fstream>

#include "launcher/janitor.h"
#include "tests/support/checkpoint_copy.h"

using namespace k3;
using namespace k3::launcher;
namespace fs = std::filesystem;

namespace {

RunRecord record_of(const std::string& name, std::int64_t pid) {
    RunRecord record;
    record.name = name;
    record.pid = pid;
    record.run_id = "ab";
    record.file = "/f/x.toml";
    record.state = "ready";
    record.gateway = "ipc:///g";
    StageRecord stage;
    stage.kind = "trunk";
    stage.name = "trunk-0";
    stage.state = "ready";
    stage.pid = 7;
    stage.restarts = 2;
    record.stages.push_back(stage);
    return record;
}

}  // namespace

TEST_CASE("the state that is written is what others find") {
    test::TempDir temp;
    fs::path base = temp.path() / "k3pipe-x";
    auto mine = RunDirectory::acquire(base, "a");
    REQUIRE(mine.has_value());
    struct stat info = {};
    REQUIRE(::stat((*mine)->path().c_str(), &info) == 0);
    CHECK((info.st_mode & 0777) == 0700);
    REQUIRE((*mine)->write(record_of("a", ::getpid())).has_value());
    auto found = find_run(base, "a");
    REQUIRE(found.has_value());
    REQUIRE(found->has_value());
    CHECK((*found)->record.pid == ::getpid());
    REQUIRE((*found)->record.stages.size() == 1);
    CHECK((*found)->record.stages[0].restarts == 2);
    CHECK(list_runs(base).size() == 1);
    mine->reset();
    CHECK_FALSE(fs::exists(base));
    CHECK_FALSE(find_run(base, "a")->has_value());
}

TEST_CASE("a second run of the same name is refused with the pid of the first") {
    test::TempDir temp;
    auto first = RunDirectory::acquire(temp.path(), "a");
    REQUIRE(first.has_value());
    REQUIRE((*first)->write(record_of("a", ::getpid())).has_value());
    auto second = RunDirectory::acquire(temp.path(), "a");
    REQUIRE_FALSE(second.has_value());
    CHECK(exit_code(second.error().code) == kExitResources);
    CHECK(second.error().message.find(std::to_string(::getpid())) != std::string::npos);
    CHECK(second.error().remedy.find("k3pipe down a") != std::string::npos);
    auto other = RunDirectory::acquire(temp.path(), "b");
    CHECK(other.has_value());
}

TEST_CASE("what a dead run left is swept, by the next of its name and by others") {
    test::TempDir temp;
    fs::path base = temp.path() / "k3pipe-x";
    fs::create_directories(base / "dead");
    std::ofstream(base / "dead" / "lock") << "";
    std::ofstream(base / "dead" / "trunk.sock") << "";
    SUBCASE("the next of its name") {
        auto next = RunDirectory::acquire(base, "dead");
        REQUIRE(next.has_value());
        CHECK_FALSE(fs::exists(base / "dead" / "trunk.sock"));
    }
    SUBCASE("another one") {
        auto other = RunDirectory::acquire(base, "alive");
        REQUIRE(other.has_value());
        CHECK(sweep_dead_runs(base) == std::vector<std::string>{"dead"});
        CHECK_FALSE(fs::exists(base / "dead"));
        CHECK(fs::exists(base / "alive"));
    }
}

TEST_CASE("a place that cannot hold the directory is refused by name") {
    test::TempDir temp;
    std::ofstream(temp.path() / "file") << "";
    auto below_a_file = RunDirectory::acquire(temp.path() / "file", "a");
    REQUIRE_FALSE(below_a_file.has_value());
    CHECK(below_a_file.error().code == ErrorCode::io);
    CHECK(below_a_file.error().message.find("file") != std::string::npos);
    auto missing_parent = RunDirectory::acquire(temp.path() / "no" / "such", "a");
    REQUIRE_FALSE(missing_parent.has_value());
    CHECK(missing_parent.error().remedy.find("XDG_RUNTIME_DIR") != std::string::npos);
}

TEST_CASE("a damaged state file is an error and not an empty answer") {
    test::TempDir temp;
    auto mine = RunDirectory::acquire(temp.path(), "a");
    REQUIRE(mine.has_value());
    test::write_file((*mine)->path() / "state.json", "{\"name\": ");
    auto found = find_run(temp.path(), "a");
    REQUIRE_FALSE(found.has_value());
    CHECK(found.error().message.find("is damaged") != std::string::npos);
}
