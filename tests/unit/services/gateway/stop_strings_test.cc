#include "services/gateway/stop_strings.h"

#include <doctest/doctest.h>

#include <string>
#include <vector>

namespace k3::gateway {

namespace {

struct Run {
    std::string text;
    std::string matched;
};

/// Pushes `pieces` until a match, flushes otherwise.
Run run(const std::vector<std::string>& stops, const std::vector<std::string>& pieces) {
    StopStrings filter(stops);
    Run out;
    for (const std::string& piece : pieces) {
        auto output = filter.push(piece);
        out.text += output.text;
        if (output.matched.has_value()) {
            out.matched = *output.matched;
            return out;
        }
    }
    out.text += filter.flush();
    return out;
}

}  // namespace

TEST_CASE("without stop strings text passes at once") {
    StopStrings filter;
    CHECK(filter.push("abc").text == "abc");
    CHECK(filter.flush().empty());
}

TEST_CASE("text ends before the stop string") {
    CHECK(run({"END"}, {"one END two"}).text == "one ");
    CHECK(run({"END"}, {"one END two"}).matched == "END");
    CHECK(run({"END"}, {"END"}).text.empty());
}

TEST_CASE("a stop string may span any number of pieces") {
    CHECK(run({"\n\nUser:"}, {"hi", "\n", "\n", "Us", "er", ": x"}).text == "hi");
    CHECK(run({"\n\nUser:"}, {"hi", "\n", "\n", "Us", "er", ": x"}).matched == "\n\nUser:");
}

TEST_CASE("only what could become a stop string is held back") {
    StopStrings filter({"abcd"});
    CHECK(filter.push("xxab").text == "xx");
    CHECK(filter.push("c").text.empty());
    CHECK(filter.push("x").text == "abcx");
    CHECK(filter.push("a").text.empty());
    CHECK(filter.push("abc").text == "a");
    CHECK(filter.flush() == "abc");
    CHECK(filter.flush().empty());
}

TEST_CASE("a prefix that repeats itself is held correctly") {
    CHECK(run({"aab"}, {"a", "a", "a", "a", "b"}).text == "aa");
    CHECK(run({"abab"}, {"ab", "a", "ac"}).text == "abaac");
    CHECK(run({"abab"}, {"aba", "bab"}).text.empty());
}

TEST_CASE("the stop string that is complete first wins, however the text is cut") {
    CHECK(run({"abc", "b"}, {"xabc"}).matched == "b");
    CHECK(run({"abc", "b"}, {"xabc"}).text == "xa");
    CHECK(run({"abc", "b"}, {"x", "a", "b", "c"}).text == "xa");
    CHECK(run({"late", "early"}, {"an early and a late one"}).matched == "early");
}

TEST_CASE("of stop strings complete at the same character the longest wins") {
    CHECK(run({"c", "abc", "bc"}, {"xabc"}).matched == "abc");
    CHECK(run({"c", "abc", "bc"}, {"xab", "c"}).text == "x");
}

TEST_CASE("every cut of a text gives the same result") {
    const std::string text = "aabaabaaacabaabab!";
    for (const std::vector<std::string>& stops :
         std::vector<std::vector<std::string>>{{"aac"}, {"abab", "ac"}, {"b!", "zz"}, {"caba"}}) {
        const Run whole = run(stops, {text});
        for (unsigned mask = 0; mask < (1U << 17U); mask += 7) {
            std::vector<std::string> pieces{""};
            for (std::size_t i = 0; i < text.size(); ++i) {
                pieces.back() += text[i];
                if ((mask >> i) & 1U) pieces.emplace_back();
            }
            const Run cut = run(stops, pieces);
            REQUIRE(cut.text == whole.text);
            REQUIRE(cut.matched == whole.matched);
        }
    }
}

TEST_CASE("characters of several bytes are never cut") {
    StopStrings filter({"\xC3\xA9!"});  // "é!"
    CHECK(filter.push("caf\xC3\xA9").text == "caf");
    CHECK(filter.push("s").text == "\xC3\xA9s");
    // "è" shares its first byte with "é", which is no reason to hold half of it.
    CHECK(filter.push("\xC3\xA8").text == "\xC3\xA8");
}

}  // namespace k3::gateway
