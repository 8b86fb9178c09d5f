// Requests that cannot be served: each ends with one sentence and the documented exit code, and the
// pipeline goes on.

#include <doctest/doctest.h>

#include <nlohmann/json.hpp>
#include <string>

#include "tests/support/golden.h"
#include "tests/support/pipeline.h"

using namespace k3;
using namespace k3::test;

TEST_CASE("a request that cannot be served is refused in a sentence, and the next one is served") {
    World world;
    Pipeline pipeline(world, "demo", demo_model_dir(), "");
    auto refused = [&](std::vector<std::string> arguments, int code,
                       const std::vector<std::string>& parts) {
        arguments.insert(arguments.begin(), {"run", "--attach"});
        Ended ended = world.k3pipe(std::move(arguments));
        INFO(ended.err);
        CHECK(ended.code == code);
        CHECK(ended.out.empty());
        CHECK(ended.seconds < 10);
        for (const std::string& part : parts) CHECK(has(ended.sentence(), part));
        Answer next = pipeline.ask(of_text("The opposite of hot is", 2));
        REQUIRE_MESSAGE(!next.error.has_value(), next.error->sentence());
        CHECK(next.text == " cold.");
    };
    refused({"-p", ""}, 2, {"empty"});
    refused({"--ids", ""}, 2, {"empty"});
    refused({"-f", world.write("bad.toml", "abc\xff\xfe").string()}, 2, {"UTF-8", "3"});
    refused({"--ids", "5,2304"}, 2, {"2304"});
    refused({"--ids", "5,x"}, 2, {"'x' (number 2)"});
    std::string long_ids = "5";
    for (int i = 0; i < 4096; ++i) long_ids += ",5";
    refused({"--ids", long_ids}, 2, {"4097", "4096"});
    std::string megabyte;
    while (megabyte.size() < 1000000) megabyte += "all work and no play ";
    refused({"-f", world.write("long.toml", megabyte).string()}, 2, {"4096"});
    refused({"-p", "x", "--temperature", "-1"}, 2, {"temperature"});
    refused({"-p", "x", "--top-p", "7"}, 2, {"top_p"});
    refused({"--messages", world.write("m.toml", "[{\"role\":\"nobody\"}]").string()}, 2,
            {"nobody"});
    refused({"--messages", world.write("m.toml", "[{").string()}, 2, {"not JSON"});
    refused({"--chat", "-p", "\xff"}, 2, {"UTF-8"});
}

TEST_CASE("a token limit inside a character ends with whole characters") {
    World world;
    Pipeline pipeline(world, "tiny", golden_dir() / "tiny-k3", "");
    // This greedy path has single bytes of longer characters; every limit is a whole text.
    msg::Submit submit = of_text("[BOS]", 0);
    submit.recognise_specials = true;
    submit.ignore_eos = true;
    std::vector<msg::Submit> submits;
    for (std::uint32_t n = 1; n <= 16; ++n) {
        submit.max_tokens = n;
        submits.push_back(submit);
    }
    std::vector<Answer> answers = ask_all(pipeline.gateway(), submits, 4);
    bool replaced = false;
    for (std::size_t i = 0; i < answers.size(); ++i) {
        REQUIRE_MESSAGE(!answers[i].error.has_value(), answers[i].error->sentence());
        CHECK(answers[i].ids.size() == i + 1);
        CHECK(answers[i].finished.reason == msg::FinishReason::max_tokens);
        // dump() throws on bytes that are not UTF-8.
        CHECK_NOTHROW(nlohmann::json(answers[i].text).dump());
        replaced = replaced || has(answers[i].text, "\xEF\xBF\xBD");
    }
    CHECK(replaced);
}
