#include "common/base/wake_latency.h"

#include <doctest/doctest.h>

#include <filesystem>
#include <fstream>

#include "tests/support/checkpoint_copy.h"

namespace k3 {

TEST_CASE("the device is held while there is work, and asked once") {
    test::TempDir dir;
    const std::filesystem::path device = dir.path() / "latency";
    std::ofstream(device).put('x');
    WakeLatency wake(device);
    CHECK_FALSE(wake.held());
    wake.busy();
    CHECK(wake.held());
    CHECK(std::filesystem::file_size(device) == 4);
    std::filesystem::remove(device);
    wake.busy();  // does not open it again
    CHECK(wake.held());
    wake.idle();
    CHECK_FALSE(wake.held());
}

TEST_CASE("who may not is not refused anything else, and does not try for ever") {
    test::TempDir dir;
    WakeLatency wake(dir.path() / "absent");
    wake.busy();
    CHECK_FALSE(wake.held());
    std::ofstream(dir.path() / "absent").put('x');
    wake.busy();
    CHECK_FALSE(wake.held());
}

}  // namespace k3
