// SaveSession and LoadSession through a served stage: what continues, what is refused, where files
// go.

#include <doctest/doctest.h>

#include <string>
#include <vector>

#include "common/base/settings.h"
#include "tests/support/checkpoint_copy.h"
#include "tests/support/text.h"
#include "tests/unit/services/trunk/harness.h"
#include "tests/unit/services/trunk/served_stage.h"

namespace k3::test {

namespace {

const std::vector<std::uint32_t> kIds = {387, 486, 344, 495, 13, 7, 99, 250};

msg::Step step_of(std::uint64_t session, std::size_t first, std::size_t last) {
    msg::Step step;
    for (std::size_t i = first; i < last; ++i) step.rows.push_back({session, i, kIds[i]});
    step.want = {static_cast<std::uint32_t>(last - first - 1)};
    return step;
}

std::vector<std::uint32_t> first_ids(std::size_t n) {
    return {kIds.begin(), kIds.begin() + static_cast<std::ptrdiff_t>(n)};
}

msg::LoadedSession loaded(ServedStage& stage, const msg::LoadSession& load) {
    auto reply = stage.ask(load);
    REQUIRE_MESSAGE(reply.has_value(), reply.error().sentence());
    return std::get<msg::LoadedSession>(reply->body);
}

/// Session 1 with five of the ids, saved as `name`.
void save_five(ServedStage& stage, const std::string& name) {
    stage.open(1);
    REQUIRE(stage.step(step_of(1, 0, 5)).has_value());
    auto reply = stage.ask(msg::SaveSession{1, name, first_ids(5)});
    REQUIRE_MESSAGE(reply.has_value(), reply.error().sentence());
    CHECK(std::get<msg::SavedSession>(reply->body).bytes > 0);
}

}  // namespace

TEST_CASE("a loaded session goes on with the same bits, in another process, and can do so again") {
    TempDir dir;
    const auto sessions = dir.path() / "made" / "at the first save";
    std::vector<float> expected;
    {
        ServedStage stage({0, 13}, false, sessions);
        save_five(stage, "chat-1");
        // The session that was saved goes on as if nothing had been.
        expected = stage.step(step_of(1, 5, 8)).value();
        CHECK(stage.count("saved_sessions") == 1);
    }
    CHECK(std::filesystem::exists(sessions / "chat-1"));
    CHECK((std::filesystem::status(sessions).permissions() & std::filesystem::perms::others_all) ==
          std::filesystem::perms::none);
    ServedStage stage({0, 13}, false, sessions);
    for (std::uint64_t session : {1, 2}) {
        CHECK(loaded(stage, {session, 32, "chat-1", kIds, "chat-2"}) ==
              msg::LoadedSession{5, 5, 5});
        CHECK(stage.step(step_of(session, 5, 8)).value() == expected);
    }
    CHECK(stage.count("loaded_sessions") == 2);
    CHECK(stage.count("loaded_positions") == 10);
}

TEST_CASE("a prompt that does not continue the saved ids gets an empty session and the counts") {
    TempDir dir;
    ServedStage stage({0, 13}, false, dir.path());
    save_five(stage, "s");
    std::vector<std::uint32_t> other = kIds;
    other[3] = 1;
    CHECK(loaded(stage, {2, 32, "s", other, ""}) == msg::LoadedSession{5, 3, 0});
    CHECK(loaded(stage, {3, 32, "s", first_ids(5), ""}) == msg::LoadedSession{5, 5, 0});
    CHECK(loaded(stage, {4, 32, "s", first_ids(2), ""}) == msg::LoadedSession{5, 2, 0});
    CHECK(stage.count("loaded_sessions") == 0);
    // They are open and begin at their beginning.
    const auto fresh = stage.step(step_of(3, 0, 5));
    REQUIRE(fresh.has_value());
    Harness trunk(tiny_model());
    trunk.open(1);
    const std::vector<float> all = trunk.feed(1, first_ids(5), 5);
    CHECK(*fresh == std::vector<float>(all.end() - 768, all.end()));
}

TEST_CASE("a loaded session counts against the budget and is refused with both numbers") {
    TempDir dir;
    ServedStage stage({0, 13}, false, dir.path());
    save_five(stage, "s");
    const Error error = stage.refusal(msg::LoadSession{2, 4096, "s", kIds, ""});
    CHECK(error.code == ErrorCode::resource_exhausted);
    CHECK_MESSAGE(contains(error.message, "session 2 of 4096 positions needs"), error.message);
    CHECK(contains(error.message, "of " + format_bytes(std::uint64_t{1} << 20U)));
    CHECK(stage.count("open_sessions") == 1);
    CHECK(stage.refusal(msg::LoadSession{2, 4, "s", kIds, ""}).code == ErrorCode::invalid_argument);
    CHECK(stage.refusal(msg::LoadSession{1, 32, "s", kIds, ""}).code ==
          ErrorCode::invalid_argument);
}

TEST_CASE("a damaged file leaves no session behind, and a good one works afterwards") {
    TempDir dir;
    ServedStage stage({0, 13}, false, dir.path());
    save_five(stage, "s");
    const std::string good = read_file(dir.path() / "s");
    std::string bad = good;
    bad[bad.size() - 100] = static_cast<char>(bad[bad.size() - 100] ^ 1);
    write_file(dir.path() / "s", bad);
    const Error error = stage.refusal(msg::LoadSession{2, 32, "s", kIds, ""});
    CHECK(error.code == ErrorCode::corrupt);
    CHECK(contains(error.message, "layer 12"));
    REQUIRE(stage.ask(msg::DropSession{99}).has_value());  // counted at the next request
    CHECK(stage.count("open_sessions") == 1);
    write_file(dir.path() / "s", good);
    CHECK(loaded(stage, {2, 32, "s", kIds, ""}).position == 5);
}

TEST_CASE("nothing outside the directory can be meant, and nothing else in it is replaced") {
    TempDir dir;
    const auto sessions = dir.path() / "sessions";
    ServedStage stage({0, 13}, false, sessions);
    save_five(stage, "s");
    write_file(sessions / "notes.txt", "mine");
    write_file(dir.path() / "target", "not yours");
    std::filesystem::create_symlink(dir.path() / "target", sessions / "link");
    for (const std::string name : {"", "..", "../s", "a/b", "/tmp/s", ".s", "a b", "a\nb"}) {
        CAPTURE(name);
        CHECK(stage.refusal(msg::SaveSession{1, name, first_ids(5)}).code ==
              ErrorCode::invalid_argument);
        CHECK(stage.refusal(msg::LoadSession{2, 32, name, kIds, ""}).code ==
              ErrorCode::invalid_argument);
    }
    for (const std::string name : {"notes.txt", "link"}) {
        const Error error = stage.refusal(msg::SaveSession{1, name, first_ids(5)});
        CHECK(error.code == ErrorCode::invalid_argument);
        CHECK(contains(error.message, name + " is there and not a saved session"));
        // Known before anything is computed.
        CHECK(stage.refusal(msg::OpenSession{2, 32, name}) == error);
        CHECK(stage.refusal(msg::LoadSession{2, 32, "s", kIds, name}) == error);
    }
    CHECK(read_file(sessions / "notes.txt") == "mine");
    CHECK(read_file(dir.path() / "target") == "not yours");
    CHECK(stage.refusal(msg::SaveSession{1, "s", first_ids(4)}).code ==
          ErrorCode::invalid_argument);
    CHECK(stage.refusal(msg::SaveSession{9, "s", first_ids(5)}).code == ErrorCode::not_found);
    CHECK(stage.count("open_sessions") == 1);
}

TEST_CASE("stages of other layers, and a stage without a directory, say so") {
    TempDir dir;
    ServedStage half({0, 7}, false, dir.path());
    half.open(1);
    msg::Step step = step_of(1, 0, 5);
    step.want = {};
    REQUIRE(half.step(step).has_value());
    REQUIRE(half.ask(msg::SaveSession{1, "s", first_ids(5)}).has_value());
    CHECK(std::filesystem::exists(dir.path() / "s.layers-0-6"));
    ServedStage whole({0, 13}, false, dir.path());
    Error error = whole.refusal(msg::LoadSession{1, 32, "s", kIds, ""});
    CHECK(error.code == ErrorCode::not_found);
    CHECK_MESSAGE(contains(error.message, "layers 0-12"), error.message);
    CHECK_MESSAGE(contains(error.message, "only s.layers-0-6"), error.message);
    std::filesystem::rename(dir.path() / "s.layers-0-6", dir.path() / "s");
    error = whole.refusal(msg::LoadSession{1, 32, "s", kIds, ""});
    CHECK(error.code == ErrorCode::incompatible);
    CHECK(contains(error.message, "layers 0-6 of 13"));

    ServedStage none({0, 13}, false);
    none.open(1);
    REQUIRE(none.step(step_of(1, 0, 5)).has_value());
    error = none.refusal(msg::SaveSession{1, "s", first_ids(5)});
    CHECK(error.code == ErrorCode::unsupported);
    CHECK(contains(error.remedy, "--session-dir"));
    CHECK(none.refusal(msg::OpenSession{2, 32, "s"}) == error);
}

}  // namespace k3::test
