#include "launcher/cli.h"

#include <doctest/doctest.h>

#include <iostream>
#include <sstream>
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

TEST_CASE("a word that nobody understands comes with what was probably meant") {
    CHECK(refusal({"up", "demo.toml"}) ==
          "up: unknown argument 'demo.toml'; a pipeline file is given with -c demo.toml");
    CHECK(refusal({"run", "What is 3 + 4?"}) ==
          "run: unknown argument 'What is 3 + 4?'; the prompt is given with -p, in quotes");
    CHECK(refusal({"-c", "demo.toml", "up"}) ==
          "flag '-c' stands before the verb up; write k3pipe up -c ...");
    CHECK(refusal({"down", "a", "b"}) == "down: unknown argument 'b'; see k3pipe down --help");
    CHECK(refusal({"run", "-p", "x", "--", "y"}).find("unknown argument 'y'") != std::string::npos);
}

TEST_CASE("a value that cannot be is refused with the range, an absent one by its flag") {
    CHECK(refusal({"run", "-p", "x", "--max-tokens", "-1"}) ==
          "run: --max-tokens: '-1' is not a whole number from 0 to 4294967295; see k3pipe run "
          "--help");
    CHECK(refusal({"run", "-p", "x", "--temperature", "hot"}).find("'hot' is not a number") !=
          std::string::npos);
    CHECK(refusal({"run", "-p", "x", "--chat", "--effort", "some"})
              .find("'some' is not one of off, low, high, max") != std::string::npos);
    CHECK(refusal({"run", "-p"}) == "run: --prompt needs a value; see k3pipe run --help");
    CHECK(refusal({"run", "-p", "x", "--seed", "1", "--seed", "2"}) ==
          "run: --seed takes one value; see k3pipe run --help");
    // A variable of a script that is not set must not mean the default.
    CHECK(refusal({"up", "-c", ""}) == "up: --config is empty; see k3pipe up --help");
    CHECK(refusal({"status", ""}) == "status: name is empty; see k3pipe status --help");
    CHECK(refusal({"run", "-p", "x", "--stop", ""}).find("--stop is empty") != std::string::npos);
    CHECK(run_of({"-p", "x", "--seed", "18446744073709551615"}).params.seed ==
          18446744073709551615ULL);
}

TEST_CASE("help is there for every verb, also without dashes") {
    for (std::vector<const char*> words : {std::vector<const char*>{"--help"},
                                           {"help"},
                                           {"up", "-h"},
                                           {"help", "run"},
                                           {"--version"},
                                           {}}) {
        std::ostringstream printed;
        std::streambuf* old = std::cout.rdbuf(printed.rdbuf());
        auto parsed = parse(words);
        std::cout.rdbuf(old);
        REQUIRE(parsed.has_value());
        CHECK(std::holds_alternative<NothingCommand>(*parsed));
        CHECK_FALSE(printed.str().empty());
        CHECK(printed.str().find("\n\n\n") == std::string::npos);
        if (words.size() == 2 && std::string(words[0]) == "help")
            CHECK(printed.str().find("--max-tokens N") != std::string::npos);
    }
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
    // Nearer to 0 than anything that fp32 holds.
    for (const char* tiny : {"1e-300", "1e-999", "-1e-300"})
        CHECK(run_of({"-p", "x", "--temperature", tiny}).params.temperature == 0.0F);
    CHECK(run_of({"-p", "x", "--temperature", "1e-300"}).greedy);
    CHECK(refusal({"run", "-p", "x", "--temperature", "1e300"})
              .find("'1e300' is beyond the largest number") != std::string::npos);
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

TEST_CASE("keys are for a gateway that runs already") {
    CHECK(run_of({"-p", "x", "--gateway", "tcp://b:1", "--keys", "k"}).keys == "k");
    CHECK(run_of({"-p", "x", "--attach", "--keys", "k"}).keys == "k");
    CHECK(refusal({"run", "-p", "x", "--keys", "k"}).find("--keys has no effect without") !=
          std::string::npos);
    auto keys = parse({"keys", "-c", "f", "--replace"});
    REQUIRE(keys.has_value());
    CHECK(std::get<KeysCommand>(*keys).config == "f");
    CHECK(std::get<KeysCommand>(*keys).replace);
}

TEST_CASE("a session may be gone on from, saved, or both") {
    const RunCommand none = run_of({"-p", "x"});
    CHECK(none.session.empty());
    CHECK(none.save_session.empty());
    const RunCommand both = run_of({"-p", "x", "--session", "a/b", "--save-session", "c"});
    CHECK(both.session == "a/b");
    CHECK(both.save_session == "c");
    CHECK(refusal({"run", "-p", "x", "--session", ""}).find("--session is empty") !=
          std::string::npos);
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

TEST_CASE("pack takes a kind, two paths and the flags of its kind") {
    auto pack_of = [](std::vector<const char*> words) {
        words.insert(words.begin(), "pack");
        auto parsed = parse(words);
        REQUIRE_MESSAGE(parsed.has_value(), parsed.error().sentence());
        return std::get<PackCommand>(*parsed);
    };
    const PackCommand trunk = pack_of({"trunk", "/m", "/f", "--layers", "0-3"});
    CHECK(trunk.kind == pack::Kind::trunk);
    CHECK(trunk.model == "/m");
    CHECK(trunk.file == "/f");
    CHECK(trunk.layers == "0-3");
    CHECK(pack_of({"trunk", "/m", "/f"}).layers == "all");
    CHECK(pack_of({"trunk", "/m", "/f"}).part == pack::Part{0, 1});
    CHECK(pack_of({"trunk", "/m", "/f", "--part", "1/2"}).part == pack::Part{1, 2});
    for (const char* part : {"2/2", "0/0", "0/9", "1", "1/", "/2", "1/2x"}) {
        CAPTURE(part);
        CHECK(refusal({"pack", "trunk", "/m", "/f", "--part", part}).find("is not I/N") !=
              std::string::npos);
    }
    CHECK(refusal({"pack", "experts", "/m", "/f", "--share", "0/2", "--part", "0/2"})
              .find("--part is for pack trunk") != std::string::npos);
    const PackCommand experts = pack_of({"experts", "/m", "/f", "--share", "1/3"});
    CHECK(experts.kind == pack::Kind::experts);
    CHECK(experts.share == "1/3");
    CHECK(pack_of({"experts", "/m", "/f", "--list", "layers 1 experts 2"}).share ==
          "layers 1 experts 2");
    CHECK(refusal({"pack", "trunk", "/m", "/f", "--share", "0/2"})
              .find("--share is for pack experts") != std::string::npos);
    CHECK(refusal({"pack", "experts", "/m", "/f", "--share", "0/2", "--layers", "1"})
              .find("--layers is for pack trunk") != std::string::npos);
    CHECK(refusal({"pack", "experts", "/m", "/f"}).find("exactly one of --share and --list") !=
          std::string::npos);
    CHECK(refusal({"pack", "experts", "/m", "/f", "--share", "0/2", "--list", "layers 1"})
              .find("exactly one of") != std::string::npos);
    CHECK(refusal({"pack", "weights", "/m", "/f"}).find("'weights' is not one of trunk, experts") !=
          std::string::npos);
    CHECK(refusal({"pack", "trunk", "/m"}).find("file is required") != std::string::npos);
}

TEST_CASE("verify takes a path and what to compare it with") {
    auto parsed = parse({"verify", "/m", "--record", "--sha256", "/sums"});
    REQUIRE(parsed.has_value());
    const auto& verify = std::get<VerifyCommand>(*parsed);
    CHECK(verify.path == "/m");
    CHECK(verify.record);
    CHECK(verify.sha256 == "/sums");
    CHECK(refusal({"verify"}).find("path is required") != std::string::npos);
    CHECK(refusal({"verify", "/m", "--sha256", ""}).find("--sha256 is empty") != std::string::npos);
}

TEST_CASE("a placement and a simulation take their figures") {
    auto parsed = parse({"placement", "-c", "f", "--replicas", "2", "--replicated", "0.25",
                         "--trace", "t.csv", "--out", "p"});
    REQUIRE_MESSAGE(parsed.has_value(), parsed.error().sentence());
    const auto& placement = std::get<PlacementCommand>(*parsed);
    CHECK(placement.replicas == 2);
    CHECK(placement.replicated == doctest::Approx(0.25));
    CHECK(placement.trace == "t.csv");
    CHECK(placement.out == "p");
    CHECK(placement.shape_given);
    CHECK(refusal({"placement", "--replicas", "65"}).find("from 1 to 64") != std::string::npos);

    parsed = parse({"plan", "--simulate", "t.csv", "--rows", "16", "--boxes", "4", "--link-rate",
                    "1.2GB", "--round-trip-us", "100"});
    REQUIRE_MESSAGE(parsed.has_value(), parsed.error().sentence());
    const auto& plan = std::get<PlanCommand>(*parsed);
    CHECK(plan.rows == 16);
    CHECK(plan.boxes == 4);
    CHECK(plan.link_rate == 1'200'000'000);
    CHECK(plan.round_trip_us == 100);
    CHECK(refusal({"plan", "--boxes", "4"}).find("no effect without --simulate") !=
          std::string::npos);
}

TEST_CASE("a sparse checkpoint has the released size and no other") {
    auto parsed = parse({"synth", "--sparse", "out"});
    REQUIRE(parsed.has_value());
    const model::SyntheticOptions options = std::get<SynthCommand>(*parsed).options;
    CHECK(options.sparse);
    CHECK(options.n_layers == 93);
    CHECK(options.n_experts == 896);
    CHECK(options.vocab_size == 163840);
    CHECK(refusal({"synth", "--sparse", "out", "--layers", "5"}) ==
          "synth: --sparse and --layers exclude each other; see k3pipe synth --help");
}
