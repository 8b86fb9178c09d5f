#include "launcher/stage_plan.h"

#include <doctest/doctest.h>

#include <algorithm>
#include <cstdlib>
#include <string>

#include "launcher/paths.h"
#include "launcher/words.h"
#include "tests/support/golden.h"
#include "tests/support/text.h"

using namespace k3;
using namespace k3::launcher;

namespace {

/// Every stage is /bin/true here: a plan starts nothing.
PipelineSpec spec_of(const std::string& stages) {
    std::string text = "[pipeline]\nname = 'p'\nmodel = '" +
                       (test::golden_dir() / "tiny-k3").string() + "'\n" + stages;
    for (std::string kind : {"tokenizer", "sampler", "experts", "trunk", "gateway"})
        if (stages.find("[" + kind + "]") == std::string::npos)
            text += "[" + kind + "]\nbinary = '/bin/true'\n";
    auto spec = parse_pipeline(text, "/f/p.toml");
    INFO(text);
    REQUIRE_MESSAGE(spec.has_value(), spec.error().sentence());
    return *spec;
}

Result<PipelinePlan> plan_of(const std::string& stages) {
    return make_plan(spec_of(stages), "/run/p", 0xab);
}

const StagePlan& stage(const PipelinePlan& plan, const std::string& name) {
    auto found = std::find_if(plan.stages.begin(), plan.stages.end(),
                              [&](const StagePlan& s) { return s.name == name; });
    REQUIRE_MESSAGE(found != plan.stages.end(), name);
    return *found;
}

std::string command(const PipelinePlan& plan, const std::string& name) {
    return shell_line(stage(plan, name).argv);
}

}  // namespace

TEST_CASE("each stage is told the endpoints that it calls") {
    auto plan = plan_of(
        "[experts]\nbinary = '/bin/true'\ncount = 2\ncache_bytes = '1MiB'\n"
        "[tokenizer]\nendpoint = 'tcp://127.0.0.1:9'\n");
    REQUIRE(plan.has_value());
    CHECK(plan->n_owned() == 5);
    CHECK(test::contains(command(*plan, "trunk"),
                         "--experts ipc:///run/p/experts-0.sock --experts "
                         "ipc:///run/p/experts-1.sock"));
    CHECK(test::contains(command(*plan, "experts-1"), "--share 1/2"));
    CHECK(test::contains(command(*plan, "experts-1"), "--cache-bytes 1MiB"));
    CHECK(test::contains(command(*plan, "experts-1"), "--run-id ab"));
    CHECK(test::contains(command(*plan, "experts-1"), "tiny-k3"));
    std::string gateway = command(*plan, "gateway");
    CHECK(test::contains(gateway, "--tokenizer tcp://127.0.0.1:9"));
    CHECK(test::contains(gateway, "--trunk ipc:///run/p/trunk.sock"));
    CHECK(test::contains(gateway, "--sampler ipc:///run/p/sampler.sock"));
    CHECK(test::contains(gateway, "--model-name tiny-k3"));
    CHECK_FALSE(stage(*plan, "tokenizer").owned);
    CHECK(plan->gateway().endpoint == "ipc:///run/p/gateway.sock");
}

TEST_CASE("keys go to the stages that answer or call on tcp, by the name of their file") {
    const std::string on_tcp = "[experts]\nbinary = '/bin/true'\nlisten = 'tcp://10.0.0.7:9'\n";
    PipelineSpec spec = spec_of(on_tcp);
    spec.keys = "/k/p.keys";
    auto plan = make_plan(spec, "/run/p", 0xab);
    REQUIRE(plan.has_value());
    CHECK(plan->keys == "/k/p.keys");
    for (const char* name : {"experts", "trunk"}) {
        CHECK(stage(*plan, name).keys == "/k/p.keys");
        CHECK(test::contains(command(*plan, name), "--keys /k/p.keys"));
    }
    for (const char* name : {"tokenizer", "sampler", "gateway"}) {
        CHECK(stage(*plan, name).keys.empty());
        CHECK_FALSE(test::contains(command(*plan, name), "--keys"));
    }

    spec = spec_of("");
    spec.keys = "/k/p.keys";
    plan = make_plan(spec, "/run/p", 0xab);
    REQUIRE(plan.has_value());
    CHECK(plan->keys.empty());  // all of it is on this box, behind socket files
}

TEST_CASE("a stage that other boxes can reach needs keys or insecure") {
    ::setenv("XDG_CONFIG_HOME", "/nowhere", 1);
    const std::string on_tcp = "[sampler]\nbinary = '/bin/true'\nlisten = 'tcp://10.0.0.7:9'\n";
    auto plan = plan_of(on_tcp);
    REQUIRE_FALSE(plan.has_value());
    CHECK(plan.error().code == ErrorCode::invalid_argument);
    CHECK(test::contains(plan.error().message, "/f/p.toml:4: other boxes can reach sampler"));
    CHECK(test::contains(plan.error().message, "/nowhere/k3pipe/keys/p.keys does not exist"));
    CHECK(test::contains(plan.error().remedy, "k3pipe keys -c FILE"));
    plan = plan_of(on_tcp + "insecure = true\n");
    REQUIRE(plan.has_value());
    CHECK(plan->keys.empty());
    CHECK(test::contains(command(*plan, "sampler"), "--insecure"));
    CHECK(plan_of("[sampler]\nbinary = '/bin/true'\nlisten = 'tcp://127.0.0.1:9'\n").has_value());
    // Who listens at an attached endpoint is not ours to decide.
    CHECK(plan_of("[sampler]\nendpoint = 'tcp://10.0.0.7:9'\n").has_value());
    ::unsetenv("XDG_CONFIG_HOME");
}

TEST_CASE("a stage listens where others can connect to") {
    const auto listening = [](const std::string& address) {
        return plan_of("insecure = true\n[sampler]\nbinary = '/bin/true'\nlisten = 'tcp://" +
                       address + ":9'\n");
    };
    for (const char* name : {"eth0", "lo", "box.example", "fd00::2"}) {
        CAPTURE(name);
        const auto refused = listening(name);
        REQUIRE_FALSE(refused.has_value());
        CHECK(refused.error().code == ErrorCode::invalid_argument);
        CHECK(test::contains(refused.error().message,
                             "'" + std::string(name) + "' is no address that others can connect"));
    }
    for (const char* wildcard : {"*", "0.0.0.0"}) {
        const auto plan = listening(wildcard);
        REQUIRE_MESSAGE(plan.has_value(), plan.error().sentence());
        CHECK(test::contains(command(*plan, "sampler"), std::string("tcp://") + wildcard + ":9"));
        CHECK(test::contains(command(*plan, "gateway"), "--sampler tcp://127.0.0.1:9"));
    }
    CHECK(listening("[fd00::2]").has_value());
    CHECK(listening("localhost").has_value());
}

TEST_CASE("saved sessions lie with the user's state") {
    ::setenv("HOME", "/home/somebody", 1);
    ::unsetenv("XDG_STATE_HOME");
    CHECK(default_session_directory() == "/home/somebody/.local/state/k3pipe/sessions");
    ::setenv("XDG_STATE_HOME", "/state", 1);
    CHECK(default_session_directory() == "/state/k3pipe/sessions");
    ::setenv("XDG_STATE_HOME", "not/absolute", 1);
    CHECK(default_session_directory() == "/home/somebody/.local/state/k3pipe/sessions");
    ::unsetenv("HOME");
    CHECK(default_session_directory().empty());
}

TEST_CASE("trunk stages without layers share them evenly, in order") {
    auto plan = plan_of("[trunk]\nbinary = '/bin/true'\ncount = 3\n");
    REQUIRE(plan.has_value());
    CHECK(test::contains(command(*plan, "trunk-0"), "--layers 0-3"));
    CHECK(test::contains(command(*plan, "trunk-1"), "--layers 4-7"));
    CHECK(test::contains(command(*plan, "trunk-2"), "--layers 8-12"));
    CHECK(test::contains(command(*plan, "gateway"),
                         "--trunk ipc:///run/p/trunk-0.sock --trunk ipc:///run/p/trunk-1.sock"));
    auto too_many = plan_of("[trunk]\nbinary = '/bin/true'\ncount = 14\n");
    REQUIRE_FALSE(too_many.has_value());
    CHECK(test::contains(too_many.error().message, "14 trunk stages for the 13 layers"));
}

TEST_CASE("a wrapper stands in front, found in PATH") {
    auto plan =
        plan_of("[sampler]\nbinary = '/bin/true'\nwrap = 'env -i'\nlisten = 'ipc:///x.s'\n");
    REQUIRE(plan.has_value());
    const StagePlan& sampler = stage(*plan, "sampler");
    CHECK(sampler.wrapped);
    CHECK(sampler.argv[0].ends_with("/env"));
    CHECK(sampler.argv[1] == "-i");
    CHECK(sampler.argv[2] == "/bin/true");
    CHECK(sampler.endpoint == "ipc:///x.s");
}

TEST_CASE("what cannot be started is refused before anything is") {
    SUBCASE("a missing binary") {
        auto plan = plan_of("[trunk]\nbinary = '/bin/nothing-here'\n");
        REQUIRE_FALSE(plan.has_value());
        CHECK(test::contains(plan.error().message,
                             "binary of trunk: /bin/nothing-here does not exist"));
        CHECK(exit_code(plan.error().code) == kExitUsage);
    }
    SUBCASE("a missing wrapper") {
        auto plan = plan_of("[trunk]\nbinary = '/bin/true'\nwrap = 'no-such-wrapper -x'\n");
        REQUIRE_FALSE(plan.has_value());
        CHECK(test::contains(plan.error().message,
                             "wrap of trunk: found no program no-such-wrapper"));
    }
    SUBCASE("a missing model") {
        PipelineSpec spec = spec_of("");
        spec.model = "/nonexistent/model";
        auto plan = make_plan(spec, "/run/p", 1);
        REQUIRE_FALSE(plan.has_value());
        CHECK(test::contains(plan.error().message,
                             "checkpoint directory /nonexistent/model does not exist"));
        CHECK(exit_code(plan.error().code) == kExitModel);
    }
    SUBCASE("a socket path that the system cannot take") {
        auto plan = make_plan(spec_of(""), "/" + std::string(100, 'x'), 1);
        REQUIRE_FALSE(plan.has_value());
        CHECK(test::contains(plan.error().message, "and the system allows 107"));
        CHECK(test::contains(plan.error().remedy, "XDG_RUNTIME_DIR"));
    }
    SUBCASE("two stages at one endpoint") {
        auto plan =
            plan_of("[sampler]\nendpoint = 'ipc:///a'\n[tokenizer]\nendpoint = 'ipc:///a'\n");
        REQUIRE_FALSE(plan.has_value());
        CHECK(test::contains(plan.error().message, "same endpoint ipc:///a"));
    }
    SUBCASE("two stages at one terminal") {
        auto plan = plan_of(
            "[sampler]\nbinary = '/bin/true'\nterminal = true\n"
            "[trunk]\nbinary = '/bin/true'\nterminal = true\n");
        REQUIRE_FALSE(plan.has_value());
        CHECK(test::contains(plan.error().message, "2 stages want the terminal"));
    }
}
