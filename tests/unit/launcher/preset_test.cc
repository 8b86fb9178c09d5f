// Budgets that `k3pipe init` deals out.

#include "launcher/preset.h"

#include <doctest/doctest.h>

#include <cstdlib>
#include <filesystem>
#include <string>

#include "launcher/plan_model.h"
#include "tests/support/checkpoint_copy.h"
#include "tests/support/golden.h"
#include "tests/support/text.h"

using namespace k3;
using namespace k3::launcher;

namespace {

/// Programs under the names of the services, found first in PATH: planning starts none.
class Programs {
  public:
    Programs() {
        for (const char* name :
             {"k3-tokenizer", "k3-sampler", "k3-experts", "k3-trunk", "k3-gateway"})
            std::filesystem::create_symlink("/bin/true", dir_.path() / name);
        ::setenv("PATH", (dir_.path().string() + ":" + before_).c_str(), 1);
    }
    ~Programs() { ::setenv("PATH", before_.c_str(), 1); }
    Programs(const Programs&) = delete;
    Programs& operator=(const Programs&) = delete;

  private:
    test::TempDir dir_;
    const std::string before_ = std::getenv("PATH");
};

/// The first number behind `before`, written like 1,234.
std::uint64_t number_after(const std::string& text, const std::string& before) {
    const std::size_t at = text.find(before);
    REQUIRE(at != std::string::npos);
    std::uint64_t number = 0;
    for (std::size_t i = at + before.size(); text[i] == ',' || (text[i] >= '0' && text[i] <= '9');
         ++i)
        if (text[i] != ',') number = number * 10 + static_cast<std::uint64_t>(text[i] - '0');
    return number;
}

}  // namespace

TEST_CASE(
    "a preset is refused below the smallest configuration, with both numbers, and not above") {
    const Programs programs;
    const ModelFiles files{test::golden_dir() / "tiny-k3", {}, {}};
    const auto weights = open_files(files);
    REQUIRE_MESSAGE(weights.has_value(), weights.error().sentence());
    const MachineCores machine = machine_cores();
    const auto refused = preset_file({"small", 12'345'678}, files, *weights, machine);
    REQUIRE_FALSE(refused.has_value());
    CHECK(refused.error().code == ErrorCode::resource_exhausted);
    CHECK(test::contains(refused.error().message, "preset small allows 12,345,678"));
    CHECK(!refused.error().remedy.empty());
    const std::uint64_t smallest = number_after(refused.error().message, " takes ");
    CHECK(smallest > 12'345'678);
    CHECK(preset_file({"small", smallest - 1}, files, *weights, machine).error().code ==
          ErrorCode::resource_exhausted);
    const auto fits = preset_file({"small", smallest}, files, *weights, machine);
    REQUIRE_MESSAGE(fits.has_value(), fits.error().sentence());
    CHECK(test::contains(*fits, "max_step_rows = 16"));
}

TEST_CASE("a preset that does not exist is refused with those that do") {
    const auto unknown = find_preset("12g", {std::uint64_t{1} << 40U, "a test"});
    REQUIRE_FALSE(unknown.has_value());
    CHECK(test::contains(unknown.error().remedy, "auto, 8g, 16g, 32g, 64g, 128g, max"));
}
