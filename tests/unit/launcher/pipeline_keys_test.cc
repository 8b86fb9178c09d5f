#include "launcher/pipeline_keys.h"

#include <doctest/doctest.h>
#include <sys/stat.h>

#include <cstdlib>
#include <fstream>

#include "common/transport/curve_keys.h"
#include "launcher/paths.h"
#include "tests/support/checkpoint_copy.h"
#include "tests/support/text.h"

using namespace k3;
using namespace k3::launcher;

TEST_CASE("keys lie where the file says, otherwise with the user's configuration") {
    ::setenv("HOME", "/home/somebody", 1);
    ::unsetenv("XDG_CONFIG_HOME");
    PipelineSpec spec;
    spec.name = "four-boxes";
    CHECK(key_file_of(spec) == "/home/somebody/.config/k3pipe/keys/four-boxes.keys");
    ::setenv("XDG_CONFIG_HOME", "/config", 1);
    CHECK(key_file_of(spec) == "/config/k3pipe/keys/four-boxes.keys");
    ::setenv("XDG_CONFIG_HOME", "not/absolute", 1);
    CHECK(key_file_of(spec) == "/home/somebody/.config/k3pipe/keys/four-boxes.keys");
    ::unsetenv("HOME");
    CHECK(key_file_of(spec).empty());
    ::unsetenv("XDG_CONFIG_HOME");
    spec.keys = "/elsewhere/k";
    CHECK(key_file_of(spec) == "/elsewhere/k");
}

TEST_CASE("a key file is made for its owner alone, and not twice") {
    test::TempDir folder;
    const std::filesystem::path path = folder.path() / "p.keys";
    const auto made = make_key_file(path, false);
    REQUIRE(made.has_value());
    struct stat facts = {};
    REQUIRE(::stat(path.c_str(), &facts) == 0);
    CHECK((facts.st_mode & 07777U) == 0600);
    const std::string text = test::read_file(path);
    CHECK(transport::CurveKeys::load(path.string()).value()->fingerprint() == *made);
    CHECK(test::contains(describe_keys(path), "fingerprint " + *made));
    CHECK_FALSE(test::contains(describe_keys(path), text.substr(28, 8)));

    const auto again = make_key_file(path, false);
    REQUIRE_FALSE(again.has_value());
    CHECK(again.error().code == ErrorCode::invalid_argument);
    CHECK(test::contains(again.error().remedy, "--replace"));
    CHECK(test::read_file(path) == text);

    const auto replaced = make_key_file(path, true);
    REQUIRE(replaced.has_value());
    CHECK(*replaced != *made);
    CHECK(test::read_file(path) != text);

    test::write_file(path, "[pipeline]\n");
    const auto other = make_key_file(path, true);
    REQUIRE_FALSE(other.has_value());
    CHECK(test::contains(other.error().message, "not a key file"));
    CHECK(test::read_file(path) == "[pipeline]\n");
}

TEST_CASE("where no key file can be made or used, the reason has its name") {
    test::TempDir folder;
    const std::filesystem::path missing = folder.path() / "no" / "p.keys";
    const auto made = make_key_file(missing, false);
    REQUIRE_FALSE(made.has_value());
    CHECK(test::contains(made.error().message, missing.parent_path().string()));
    CHECK(test::contains(describe_keys(missing), "does not exist"));
}
