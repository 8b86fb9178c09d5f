// Which saved sessions a directory of limited size gives up, and which it never does.

#include "services/trunk/session_retention.h"

#include <doctest/doctest.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <memory>
#include <string>
#include <vector>

#include "services/trunk/session_directory.h"
#include "tests/support/checkpoint_copy.h"
#include "tests/support/text.h"
#include "tests/unit/services/trunk/harness.h"

namespace k3::test {

namespace {

constexpr trunk::LayerRange kStageRange{2, 6};

/// Sessions of a stage of six layers, older ones first in time.
struct FullDirectory {
    TempDir dir;
    trunk::SessionLayout layout{tiny_model().config, kStageRange, 1};
    trunk::SessionOrigin origin{tiny_model().fingerprint, kStageRange, tiny_model().config.n_layers,
                                tiny_model().config.mla.lora_norm_eps};
    std::unique_ptr<trunk::Session> session = trunk::Session::create(layout, 1, 64).value();
    std::vector<std::uint32_t> ids = std::vector<std::uint32_t>(5, 7);
    std::uint64_t each = trunk::session_file_bytes(layout, 5);

    FullDirectory() { session->set_position(5); }
    trunk::SessionDirectory directory(std::uint64_t limit_bytes) const {
        return {{dir.path(), limit_bytes}, origin, layout, 4096};
    }
    std::filesystem::path file(const std::string& name) const {
        return dir.path() / (name + ".layers-2-7");
    }
    void save(const std::string& name, int age_s) const {
        REQUIRE(directory(0).save(name, ids, *session).has_value());
        std::filesystem::last_write_time(file(name), std::filesystem::file_time_type::clock::now() -
                                                         std::chrono::seconds(age_s));
    }
    std::string names() const {
        std::vector<std::string> all;
        for (const auto& entry : std::filesystem::directory_iterator(dir.path()))
            all.push_back(entry.path().filename().string());
        std::sort(all.begin(), all.end());
        std::string text;
        for (const std::string& name : all) text += (text.empty() ? "" : " ") + name;
        return text;
    }
};

}  // namespace

TEST_CASE("a full directory gives up what was saved or loaded longest ago, and no more") {
    FullDirectory f;
    f.save("a", 400);
    f.save("b", 300);
    f.save("c", 200);
    write_file(f.dir.path() / "notes", std::string(1000, 'x'));  // no session: not counted
    // A session that is loaded has been used just now.
    REQUIRE(f.directory(0).open("a").has_value());
    REQUIRE(f.directory(3 * f.each).save("d", f.ids, *f.session).has_value());
    CHECK(f.names() == "a.layers-2-7 c.layers-2-7 d.layers-2-7 notes");
    // Replacing one takes no more room.
    REQUIRE(f.directory(3 * f.each).save("c", f.ids, *f.session).has_value());
    CHECK(f.names() == "a.layers-2-7 c.layers-2-7 d.layers-2-7 notes");
    REQUIRE(f.directory(2 * f.each - 1).save("e", f.ids, *f.session).has_value());
    CHECK(f.names() == "e.layers-2-7 notes");
}

TEST_CASE("without a limit nothing is removed") {
    FullDirectory f;
    for (int i = 0; i < 5; ++i) f.save("s" + std::to_string(i), 1000 * i);
    CHECK(std::distance(std::filesystem::directory_iterator(f.dir.path()), {}) == 5);
}

TEST_CASE("a session that cannot fit is refused with the numbers, and nothing is removed for it") {
    FullDirectory f;
    f.save("a", 10);
    const Error error = f.directory(f.each - 1).save("b", f.ids, *f.session).error();
    CHECK(error.code == ErrorCode::resource_exhausted);
    CHECK_MESSAGE(contains(error.message, "session 'b' needs"), error.message);
    CHECK(contains(error.message, f.dir.path().string()));
    CHECK(contains(error.remedy, "--session-dir-bytes"));
    CHECK(f.names() == "a.layers-2-7");
}

TEST_CASE("a session that is being read or written stays, and the next one goes instead") {
    FullDirectory f;
    f.save("a", 400);
    f.save("b", 300);
    f.save("c", 200);
    auto reading = f.directory(0).open("a");
    REQUIRE(reading.has_value());
    std::filesystem::last_write_time(
        f.file("a"), std::filesystem::file_time_type::clock::now() - std::chrono::hours(1));
    const std::filesystem::path part =
        f.dir.path() / (".b.layers-0-1." + std::to_string(::getpid()) + ".partial");
    write_file(part, "");
    const auto removed = trunk::make_room(f.dir.path(), 3 * f.each, f.file("d"), f.each).value();
    CHECK(removed == std::vector<std::string>{"c"});
    CHECK(std::filesystem::exists(f.file("a")));
    CHECK(std::filesystem::exists(f.file("b")));
    std::filesystem::remove(part);
    // What stays is told when it leaves no room.
    const auto refused = trunk::make_room(f.dir.path(), f.each, f.file("d"), f.each);
    REQUIRE_FALSE(refused.has_value());
    CHECK(refused.error().code == ErrorCode::resource_exhausted);
    CHECK(std::filesystem::exists(f.file("a")));
}

TEST_CASE("the files of one session go together") {
    FullDirectory f;
    f.save("a", 400);
    std::filesystem::copy_file(f.file("a"), f.dir.path() / "a.layers-0-1");
    std::filesystem::last_write_time(
        f.dir.path() / "a.layers-0-1",
        std::filesystem::file_time_type::clock::now() - std::chrono::seconds(100));
    f.save("b", 200);
    std::filesystem::copy_file(f.file("b"), f.dir.path() / "b.layers-x");  // a name of its own
    std::filesystem::last_write_time(
        f.dir.path() / "b.layers-x",
        std::filesystem::file_time_type::clock::now() - std::chrono::seconds(50));
    // `a` was used after `b`, by another stage.
    CHECK(trunk::make_room(f.dir.path(), 4 * f.each, f.file("c"), f.each).value() ==
          std::vector<std::string>{"b"});
    CHECK(trunk::make_room(f.dir.path(), 2 * f.each, f.file("c"), f.each).value() ==
          std::vector<std::string>{"a"});
    CHECK(f.names() == "b.layers-x");
}

}  // namespace k3::test
