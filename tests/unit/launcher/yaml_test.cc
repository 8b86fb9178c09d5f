#include "launcher/yaml.h"

#include <doctest/doctest.h>

#include <nlohmann/json.hpp>

using k3::launcher::to_yaml;
using Json = nlohmann::ordered_json;

TEST_CASE("values become blocks and lists, and texts stay texts") {
    const Json value = {{"a", {{"b", "no"}, {"n", 3}, {"on", true}}},
                        {"list", Json::array({"1e3", Json::array(), Json::object(), "x: #y"})},
                        {"objects", Json::array({Json{{"k", "v"}, {"l", Json::array({1, 2})}}})},
                        {"0", "a\"b\\\n\tc"}};
    CHECK(to_yaml(value) ==
          "a:\n  b: \"no\"\n  n: 3\n  on: true\n"
          "list:\n  - \"1e3\"\n  - []\n  - {}\n  - \"x: #y\"\n"
          "objects:\n  - k: \"v\"\n    l:\n      - 1\n      - 2\n"
          "\"0\": \"a\\\"b\\\\\\n\\tc\"\n");
}

TEST_CASE("a text of lines is a literal block only where that gives it back") {
    CHECK(to_yaml({{"t", "[a]\n\n  b: 1\n"}}) == "t: |\n  [a]\n\n    b: 1\n");
    for (const char* text : {"no end", " first is indented\n", "two ends\n\n", "\n", "tab\t\n",
                             "gr\xc3\xbc\xc3\x9f\x65\n", ""})
        CHECK_MESSAGE(to_yaml({{"t", text}}).find('|') == std::string::npos, text);
}
