#include "common/base/build_id.h"

#include <doctest/doctest.h>

#include <string>

using namespace k3;

TEST_CASE(
    "the build of this program is a digest in hexadecimal, and the same whenever it is asked") {
    const std::string digest = build_id();
    CHECK(digest.size() == 40);
    CHECK(digest.find_first_not_of("0123456789abcdef") == std::string::npos);
    CHECK(build_id() == digest);
}
