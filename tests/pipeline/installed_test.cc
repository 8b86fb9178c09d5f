// An installed tree: moved to another place and used from another folder.

#include <doctest/doctest.h>

#include <cstdlib>
#include <filesystem>
#include <string>

#include "tests/support/pipeline.h"
#include "tests/support/text.h"

using namespace k3;
using namespace k3::test;
namespace fs = std::filesystem;

namespace {

fs::path program_below(const fs::path& folder, const std::string& name) {
    for (const auto& entry : fs::recursive_directory_iterator(folder))
        if (entry.path().filename() == name && entry.is_regular_file()) return entry.path();
    return {};
}

}  // namespace

TEST_CASE("an installed k3pipe finds its services, its files and its model") {
    World world;
    if (std::system("command -v meson > /dev/null 2>&1") != 0) {
        MESSAGE("NOT RUN: meson is not in PATH");
        return;
    }
    TempDir temp;
    auto shell = [&world](const std::string& command) {
        return world.start_program({"/bin/sh", "-c", command}).wait();
    };
    Ended installed = shell("exec meson install --no-rebuild --quiet --destdir '" +
                            (temp.path() / "first").string() + "' -C '" + built("").string() + "'");
    INFO(installed.out);
    REQUIRE_MESSAGE(installed.code == 0, installed.err);
    fs::rename(temp.path() / "first", temp.path() / "moved");
    fs::path k3pipe = program_below(temp.path(), "k3pipe");
    REQUIRE(fs::exists(k3pipe));

    Ended plan = shell("cd / && exec '" + k3pipe.string() + "' plan");
    INFO(plan.err);
    CHECK(plan.code == 0);
    CHECK(contains(plan.out, k3pipe.parent_path().string() + "/k3-trunk --listen"));
    CHECK(contains(plan.out, (temp.path() / "moved").string()));
    CHECK_FALSE(contains(plan.out, built("").string()));
    CHECK_FALSE(contains(plan.out, std::string(std::getenv("K3_SOURCE_ROOT")) + "/"));

    // Also by a link, as in a folder of PATH.
    fs::create_symlink(k3pipe, temp.path() / "link");
    Ended run = shell("cd / && exec '" + (temp.path() / "link").string() +
                      "' run -p 'The capital of France is' --max-tokens 1");
    INFO(run.err);
    CHECK(run.code == 0);
    CHECK(run.out == " Paris");
}
