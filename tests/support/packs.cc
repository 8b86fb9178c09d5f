#include "tests/support/packs.h"

#include <doctest/doctest.h>

#include <algorithm>

#include "tests/support/golden.h"

namespace k3::test {

namespace fs = std::filesystem;

fs::path Packs::trunk(const std::string& layers) { return make("trunk", "--layers", layers); }

fs::path Packs::trunk_part(const std::string& part) { return make("trunk", "--part", part); }

fs::path Packs::experts(const std::string& share) { return make("experts", "--share", share); }

fs::path Packs::config_only() {
    const fs::path directory = dir_.path() / "config-only";
    fs::create_directories(directory);
    fs::copy_file(golden_dir() / "tiny-k3" / "config.json", directory / "config.json",
                  fs::copy_options::overwrite_existing);
    return directory;
}

fs::path Packs::make(const std::string& kind, const std::string& flag, const std::string& value) {
    std::string name = kind + "-" + value;
    std::replace(name.begin(), name.end(), '/', '_');
    const fs::path file = dir_.path() / name;
    if (fs::exists(file)) return file;
    const Ended packed = world_.k3pipe(
        {"pack", kind, (golden_dir() / "tiny-k3").string(), file.string(), flag, value});
    REQUIRE_MESSAGE(packed.code == 0, packed.err);
    return file;
}

}  // namespace k3::test
