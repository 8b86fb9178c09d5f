#include "launcher/words.h"

#include <doctest/doctest.h>

#include <string>
#include <vector>

using namespace k3;
using namespace k3::launcher;

TEST_CASE("a wrapper is split as a shell would, and printed back so that a shell agrees") {
    auto words = split_words(R"(perf  record -o "my file" '' it\'s 'a"b' "c\"d")");
    REQUIRE(words.has_value());
    CHECK(*words ==
          std::vector<std::string>{"perf", "record", "-o", "my file", "", "it's", "a\"b", "c\"d"});
    CHECK(shell_line({"a", "my file", "it's", ""}) == R"(a 'my file' 'it'\''s' '')");
    CHECK(*split_words(shell_line(*words)) == *words);
    CHECK(split_words("  ")->empty());
}
