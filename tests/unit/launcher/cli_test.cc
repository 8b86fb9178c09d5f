#include "launcher/cli.h"

#include <doctest/doctest.h>

#include <string>
#include <vector>

using namespace k3;
using namespace k3::launcher;

namespace {

Result<CommandLine> parse(std::vector<const char*> words) {
    words.insert(words.begin(), "k3pipe");
    return parse_command_line(static_cast<int>(words.size()), words.data());
}

RunCommand run_of(std::vector<const char*> words) {
    words.insert(words.begin(), "run");
    auto parsed = parse(words);
    REQUIRE_MESSAGE(parsed.has_value(), parsed.error().sentence());
    REQUIRE(std::holds_alternative<RunCommand>(*parsed));
    return std::get<RunCommand>(*parsed);
}

std::string refusal(const std::vector<const char*>& words) {
    auto parsed = parse(words);
    REQUIRE_FALSE(parsed.has_value());
    CHECK(parsed.error().code == ErrorCode::invalid_argument);
    return parsed.error().sentence();
}

}  // namespace

TEST_CASE("a typo in a verb or a flag names what was meant") {
    CHECK(refusal({"rnu", "-p", "x"}) == "unknown verb 'rnu'; did you mean run?");
    CHECK(refusal({"stauts"}) == "unknown verb 'stauts'; did you mean status?");
    CHECK(refusal({"run", "-p", "x", "--tempeature", "1"}) ==
          "run: unknown flag '--tempeature'; did you mean --temperature?");
    CHECK(refusal({"run", "--promt=x"}) == "run: unknown flag '--promt'; did you mean --prompt?");
    CHECK(refusal({"up", "--nmae", "x"}) == "up: unknown flag '--nmae'; did you mean --name?");
    CHECK(refusal({"frobnicate"}) == "unknown verb 'frobnicate'; see k3pipe --help");
}

TEST_CASE("exactly one prompt is needed") {
    CHECK(refusal({"run"}).find("exactly one of -p, -f, --ids and --messages") !=
          std::string::npos);
    CHECK(refusal({"run", "-p", "x", "--ids", "1"}).find("exactly one of") != std::string::npos);
}

TEST_CASE("decoding is greedy unless sampling is asked for") {
    CHECK(run_of({"-p", "x"}).greedy);
    CHECK(run_of({"-p", "x"}).params.temperature == 0.0F);
    RunCommand filtered = run_of({"-p", "x", "--top-p", "0.9"});
    CHECK_FALSE(filtered.greedy);
    CHECK(filtered.params.temperature == 1.0F);
    CHECK(filtered.params.top_p == 0.9F);
    RunCommand hot = run_of({"-p", "x", "--temperature", "0.5", "--seed", "7"});
    CHECK(hot.params.temperature == 0.5F);
    CHECK(hot.params.seed == 7);
    CHECK(hot.seed_given);
}

TEST_CASE("values arrive as they were given") {
    RunCommand run = run_of({"-p", "-5 + 3 =", "--stop", "a, b", "--stop", "--", "--max-tokens",
                             "0", "-c", "/a folder/x.toml"});
    CHECK(run.prompt == "-5 + 3 =");
    CHECK(run.stops == std::vector<std::string>{"a, b", "--"});
    CHECK(run.max_tokens == 0);
    CHECK(run.config == "/a folder/x.toml");
    CHECK_FALSE(run.attach);
    CHECK(run_of({"--attach", "-p", "x"}).attach);
    CHECK(run_of({"--attach", "demo", "-p", "x"}).attach_name == "demo");
    CHECK(run_of({"-p", ""}).prompt == "");
    CHECK(run_of({"--chat", "-p", "x", "--effort", "max"}).effort == Effort::max);
}

TEST_CASE("flags that would have no effect are refused") {
    CHECK(refusal({"run", "-p", "x", "--effort", "low"}).find("--effort has no effect without") !=
          std::string::npos);
    CHECK(refusal({"run", "-p", "x", "--logprobs", "3"}).find("without --json") !=
          std::string::npos);
    CHECK(refusal({"run", "-p", "x", "--attach", "-c", "f"}).find("exclude each other") !=
          std::string::npos);
    CHECK(refusal({"run", "-p", "x", "--chat", "--special"}).find("--special is for plain text") !=
          std::string::npos);
    CHECK(refusal({"run", "-p", "x", "--max-tokens", "abc"}).find("abc") != std::string::npos);
}
