// Argument strings: what counts as an object, and that spelling survives.

#include "services/tokenizer/call_arguments.h"

#include <doctest/doctest.h>

#include <nlohmann/json.hpp>
#include <random>

#include "services/tokenizer/utf8.h"
#include "tests/unit/services/tokenizer/fixtures.h"

using namespace k3;
using namespace k3::tokenizer;

namespace {

/// "key:type=text|..." or the raw text in ().
std::string shown(const CallArguments& arguments) {
    if (!arguments.raw.empty()) return "(" + arguments.raw + ")";
    std::string out;
    for (const CallArgument& member : arguments.members) {
        out += member.key + ":" + std::string(member.type) + "=" + member.text + "|";
    }
    return out;
}

std::string scan(std::string_view text) { return shown(arguments_of_string(text)); }

}  // namespace

TEST_CASE("values keep their spelling, strings lose their escapes") {
    CHECK(scan(R"({})").empty());
    CHECK(scan("\t\r\n { \n } trailing {").empty());
    CHECK(scan(R"({"a":1e2,"b": -0.50E-07 ,"c":[ 1,2 ]})") ==
          "a:number=1e2|b:number=-0.50E-07|c:array=[ 1,2 ]|");
    CHECK(scan(R"({"a":{ "b" : {"c":[]} } , "a":null,"a":true,"a":false})") ==
          R"(a:object={ "b" : {"c":[]} }|a:null=null|a:boolean=true|a:boolean=false|)");
    CHECK(scan(R"({"":"\"\\\/\b\f\n\r\t"})") == ":string=\"\\/\b\f\n\r\t|");
    CHECK(scan(R"({"\u5317":"\u4eac \u00E9 \ud83d\ude42"})") ==
          "\u5317:string=\u4eac \u00E9 \U0001F642|");
    CHECK(scan(R"({"a":["]","}","\"]"]})") == R"(a:array=["]","}","\"]"]|)");
}

TEST_CASE("half a surrogate pair becomes the replacement character") {
    CHECK(scan(R"({"a":"\ud83d"})") == "a:string=\uFFFD|");
    CHECK(scan(R"({"a":"\ude42x"})") == "a:string=\uFFFDx|");
    CHECK(scan(R"({"a":"\ud83d\u0041"})") == "a:string=\uFFFD\u0041|");
    CHECK(scan(R"({"a":"\ud83d\ud83d\ude42"})") == "a:string=\uFFFD\U0001F642|");
    CHECK(scan(R"({"a":"\ud83d\n"})") == "a:string=\uFFFD\n|");
}

TEST_CASE("what is no JSON object stays as it is") {
    for (std::string text : {"x",
                             " ",
                             "[1,2]",
                             "\"a\"",
                             "1",
                             "null",
                             "{",
                             "{\"a\"",
                             "{\"a\":",
                             "{\"a\":1",
                             "{\"a\":1,",
                             "{\"a\":1,}",
                             "{,}",
                             "{a:1}",
                             "{'a':1}",
                             "{\"a\":01}",
                             "{\"a\":1.}",
                             "{\"a\":.5}",
                             "{\"a\":+1}",
                             "{\"a\":1e}",
                             "{\"a\":-}",
                             "{\"a\":NaN}",
                             "{\"a\":tru}",
                             "{\"a\":truex}",
                             "{\"a\":\"\\x\"}",
                             "{\"a\":\"\\u12\"}",
                             "{\"a\":\"\\u12g4\"}",
                             "{\"a\":\"x}",
                             "{\"a\":\"\n\"}",
                             "{\"a\":[1,]}",
                             "{\"a\":[1}",
                             "{\"a\":[}",
                             "{\"a\":{\"b\"}}",
                             "{\"a\":{\"b\":1,}}",
                             "{\"a\":[1 2]}",
                             "{\"a\" 1}",
                             "{\"a\":1 \"b\":2}",
                             "{\"a\":\"\\"}) {
        CAPTURE(text);
        CHECK(scan(text) == "(" + text + ")");
    }
}

TEST_CASE("the scanner accepts exactly what a JSON parser accepts") {
    constexpr std::uint64_t kSeed = 11;
    CAPTURE(kSeed);
    std::mt19937_64 random(kSeed);
    constexpr std::string_view kAlphabet = "{}[]:,\"\\ truefalsn0123-+.eEu\n";
    int accepted = 0;
    for (int i = 0; i < 20'000; ++i) {
        // A good text with a few bytes changed, so that both answers occur.
        std::string text = R"({"a":[1,-2.5e3,{"b":null}],"c":"x\n\u00e9","d":true,"e":{}})";
        for (std::uint64_t n = random() % 3; n > 0; --n)
            text[random() % text.size()] = kAlphabet[random() % kAlphabet.size()];
        bool object = nlohmann::json::accept(text) && text[0] == '{';
        CallArguments scanned = arguments_of_string(text);
        if (object) ++accepted;
        // Text after the closing brace is ignored here, so only one direction holds for it.
        if (object) CHECK(scanned.raw.empty());
        if (!scanned.raw.empty()) CHECK_FALSE(object);
    }
    CHECK(accepted > 2'000);
    CHECK(accepted < 18'000);
}
