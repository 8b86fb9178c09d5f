// Requests that cannot be served: each ends with one sentence and the documented exit code, and the
// pipeline goes on.

#include <doctest/doctest.h>
#include <signal.h>

#include <nlohmann/json.hpp>
#include <sstream>
#include <string>

#include "tests/faults/refusal.h"
#include "tests/support/golden.h"
#include "tests/support/pipeline.h"

using namespace k3;
using namespace k3::test;
using nlohmann::json;

namespace {

/// The lines of `run --json`.
std::vector<json> events_of(const std::string& out) {
    std::vector<json> events;
    std::istringstream lines(out);
    for (std::string line; std::getline(lines, line);) events.push_back(json::parse(line));
    return events;
}

}  // namespace

TEST_CASE("a request that cannot be served is refused in a sentence, and the next one is served") {
    World world;
    Pipeline pipeline(world, "demo", demo_model_dir(), "");
    auto refused = [&](std::vector<std::string> arguments, int code,
                       const std::vector<std::string>& parts) {
        arguments.insert(arguments.begin(), {built("launcher/k3pipe").string(), "run", "--attach"});
        check_refused_command(world, arguments, code, parts);
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
    // A megabyte of words, and of one word without an end.
    std::string megabyte;
    while (megabyte.size() < 1000000) megabyte += "all work and no play ";
    megabyte.resize(1000000);
    refused({"-f", world.write("long.toml", megabyte).string()}, 2, {"333336 ids", "4096"});
    refused({"-f", world.write("word.toml", std::string(1000000, 'a')).string()}, 2,
            {"1000000 ids", "4096"});
    refused({"-p", "x", "--temperature", "-1"}, 2, {"temperature -1 is not allowed", "10"});
    refused({"-p", "x", "--top-p", "7"}, 2, {"top_p 7 is not allowed", "1"});
    refused({"--messages", world.write("m.toml", "[{\"role\":\"nobody\"}]").string()}, 2,
            {"nobody"});
    refused({"--messages", world.write("m.toml", "[{").string()}, 2, {"not JSON"});
    refused({"--chat", "-p", "\xff"}, 2, {"UTF-8"});
}

TEST_CASE("with --json what fails before there is a request ends with an event, too") {
    World world;
    std::vector<std::string> argv = {"run", "-p", "x", "--json"};
    std::string code = "not_found";
    SUBCASE("no such model") {
        argv.insert(argv.end(), {"-c", pipeline_of(world, "/nonexistent", "")});
    }
    SUBCASE("a service that refuses to start") {
        const std::string stages = "[experts]\nshare = 'experts 0-99'\n";
        argv.insert(argv.end(), {"-c", pipeline_of(world, golden_dir() / "tiny-k3", stages)});
        code = "invalid_argument";
    }
    SUBCASE("nothing to attach to") {
        argv.insert(argv.end(), {"--attach", "nobody"});
        code = "unavailable";
    }
    Ended ended = world.k3pipe(argv);
    CHECK(ended.code != 0);
    std::vector<json> events = events_of(ended.out);
    REQUIRE(events.size() == 1);
    CHECK(events[0]["event"] == "error");
    CHECK(events[0]["code"] == code);
    CHECK(has(ended.sentence(), events[0]["message"].get<std::string>()));
}

TEST_CASE("with --json a request that fails ends with an event of the error and what came before") {
    World world;
    Pipeline pipeline(world, "demo", demo_model_dir(), "");
    auto check_event = [](const json& event, const Ended& ended, const std::string& code) {
        CAPTURE(event.dump());
        CHECK(event["event"] == "error");
        CHECK(event["code"] == code);
        // The same as the sentence on stderr.
        CHECK(ended.sentence() ==
              event["message"].get<std::string>() + "; " + event["remedy"].get<std::string>());
    };
    SUBCASE("refused before it began") {
        Ended ended = world.k3pipe({"run", "--attach", "--ids", "5,2304", "--json"});
        CHECK(ended.code == 2);
        std::vector<json> events = events_of(ended.out);
        REQUIRE(events.size() == 1);
        check_event(events[0], ended, "invalid_argument");
        CHECK(has(events[0]["message"], "2304"));
        CHECK(events[0]["ids"] == json::array());
        CHECK(events[0]["text"] == "");
    }
    SUBCASE("broken off in the middle") {
        const std::string prompt = "Once upon a time there was a";
        Program client = world.start(
            {"run", "--attach", "-p", prompt, "--max-tokens", "2000", "--ignore-eos", "--json"});
        REQUIRE_MESSAGE(client.prints("\"tokens\""), client.err());
        ::kill(static_cast<pid_t>(pipeline.stage("sampler").pid), SIGKILL);
        Ended ended = client.wait();
        CHECK(ended.code == 5);
        std::vector<json> events = events_of(ended.out);
        REQUIRE(events.size() >= 3);
        CHECK(events[0]["event"] == "accepted");
        check_event(events.back(), ended, "unavailable");
        CHECK(has(events.back()["message"], "sampler"));
        json ids = json::array();
        std::string text;
        for (std::size_t i = 1; i + 1 < events.size(); ++i) {
            CHECK(events[i]["event"] == "tokens");
            for (const json& id : events[i]["ids"]) ids.push_back(id);
            text += events[i]["text"].get<std::string>();
        }
        CHECK(events.back()["ids"] == ids);
        CHECK(events.back()["text"] == text);
        CHECK(pipeline.complete_again("sampler", 1));
    }
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
        CHECK_NOTHROW(json(answers[i].text).dump());
        replaced = replaced || answers[i].text.find("\xEF\xBF\xBD") != std::string::npos;
    }
    CHECK(replaced);
}
