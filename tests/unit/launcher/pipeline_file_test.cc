#include "launcher/pipeline_file.h"

#include <doctest/doctest.h>

#include <string>

#include "launcher/server_weights.h"
#include "tests/support/text.h"

using namespace k3;
using namespace k3::launcher;

namespace {

Result<PipelineSpec> parse(const std::string& text) {
    return parse_pipeline(text, "/some/where/file.toml");
}

std::string refusal(const std::string& text) {
    auto spec = parse(text);
    REQUIRE_FALSE(spec.has_value());
    CHECK(spec.error().code == ErrorCode::invalid_argument);
    return spec.error().sentence();
}

}  // namespace

TEST_CASE("a file with a model alone describes one stage of each kind") {
    auto spec = parse("[pipeline]\nmodel = 'm'\n");
    REQUIRE(spec.has_value());
    CHECK(spec->name == "file");
    CHECK(spec->model == "/some/where/m");
    REQUIRE(spec->stages.size() == 5);
    CHECK(spec->stages.front().name == "tokenizer");
    CHECK(spec->stages.back().kind == msg::ServiceKind::gateway);
    REQUIRE(spec->of_kind(msg::ServiceKind::experts).size() == 1);
    CHECK(spec->of_kind(msg::ServiceKind::experts).front()->find("share")->values ==
          std::vector<std::string>{"all"});
}

TEST_CASE("every other key of a stage is a setting of the service") {
    auto spec = parse(
        "[pipeline]\nmodel='/m/'\n[trunk]\nthreads = 3\nfast = true\nslow = false\nx = 1.5\n"
        "words = ['a', 'b']\n");
    REQUIRE(spec.has_value());
    CHECK(spec->model == "/m");
    const StageSpec& trunk = *spec->of_kind(msg::ServiceKind::trunk).front();
    CHECK(trunk.find("threads")->values == std::vector<std::string>{"3"});
    CHECK(trunk.find("fast")->values.empty());
    CHECK(trunk.find("slow") == nullptr);
    CHECK(trunk.find("x")->values == std::vector<std::string>{"1.5"});
    CHECK(trunk.find("words")->values == std::vector<std::string>{"a", "b"});
}

TEST_CASE("files of expert servers are relative to the pipeline file, and of one server alone") {
    auto spec = parse(
        "[pipeline]\nmodel='m'\n[[experts]]\ndisk_cache = 'cache/a'\ntrace = '/tmp/a.csv'\n"
        "[[experts]]\ndisk_cache = 'cache/b'\nwarm_file = '../b.warm'\n");
    REQUIRE(spec.has_value());
    auto experts = spec->of_kind(msg::ServiceKind::experts);
    CHECK(experts[0]->find("disk_cache")->values.front() == "/some/where/cache/a");
    CHECK(experts[0]->find("trace")->values.front() == "/tmp/a.csv");
    CHECK(experts[1]->find("warm_file")->values.front() == "/some/b.warm");
    const std::string sentence =
        refusal("[pipeline]\nmodel='m'\n[experts]\ncount = 2\ndisk_cache = 'cache'\n");
    CHECK(test::contains(sentence, "file.toml:3"));
    CHECK(test::contains(sentence, "'experts-1' is not the only server with disk_cache"));
    CHECK(test::contains(sentence, "/some/where/cache"));
}

TEST_CASE("each part of a pack is relative to the pipeline file") {
    auto spec = parse("[pipeline]\nmodel='m'\n[trunk]\npack = ['a', '/disk2/b', '../c']\n");
    REQUIRE(spec.has_value());
    CHECK(spec->of_kind(msg::ServiceKind::trunk).front()->find("pack")->values ==
          std::vector<std::string>{"/some/where/a", "/disk2/b", "/some/c"});
}

TEST_CASE("the directory of saved sessions is relative to the file, and may be none") {
    auto spec = parse(
        "[pipeline]\nmodel='m'\n[[trunk]]\nsession_dir = 'saved'\n[[trunk]]\nsession_dir = "
        "'/s'\n[[trunk]]\nsession_dir = ''\n");
    REQUIRE(spec.has_value());
    const auto trunks = spec->of_kind(msg::ServiceKind::trunk);
    CHECK(trunks[0]->find("session_dir")->values.front() == "/some/where/saved");
    CHECK(trunks[1]->find("session_dir")->values.front() == "/s");
    CHECK(trunks[2]->find("session_dir")->values.front().empty());
}

TEST_CASE("copies and listed servers are striped and numbered together") {
    auto spec = parse("[pipeline]\nmodel='m'\n[[experts]]\ncount = 2\n[[experts]]\n");
    REQUIRE(spec.has_value());
    auto experts = spec->of_kind(msg::ServiceKind::experts);
    REQUIRE(experts.size() == 3);
    CHECK(experts[0]->name == "experts-0");
    CHECK(experts[2]->name == "experts-2");
    CHECK(experts[1]->find("share")->values.front() == "1/3");
    CHECK(experts[2]->find("share")->values.front() == "2/3");
}

TEST_CASE("a share is given to all expert servers or to none") {
    std::string sentence =
        refusal("[pipeline]\nmodel='m'\n[[experts]]\nshare = 'layers 1-3'\n[[experts]]\n");
    CHECK(test::contains(sentence, "file.toml:5"));
    CHECK(test::contains(sentence, "'experts-1' has no share"));
}

TEST_CASE("a stage is swapped by one line") {
    auto spec = parse(
        "[pipeline]\nmodel='m'\n[trunk]\nwrap = \"gdb --args\"\n[sampler]\nbinary = './mine'\n"
        "[tokenizer]\nendpoint = 'ipc:///tmp/t.sock'\n[gateway]\nwrap = 'nice -n 5'\n");
    REQUIRE(spec.has_value());
    const StageSpec& trunk = *spec->of_kind(msg::ServiceKind::trunk).front();
    CHECK(trunk.wrap == std::vector<std::string>{"gdb", "--args"});
    CHECK(trunk.terminal);
    CHECK(spec->of_kind(msg::ServiceKind::sampler).front()->binary == "/some/where/mine");
    CHECK(spec->of_kind(msg::ServiceKind::tokenizer).front()->attached());
    CHECK_FALSE(spec->of_kind(msg::ServiceKind::gateway).front()->terminal);
}

TEST_CASE("a mistake in the file is one sentence with its line") {
    SUBCASE("syntax") {
        std::string sentence = refusal("[pipeline]\nmodel = \n");
        CHECK(test::contains(sentence, "/some/where/file.toml:2"));
    }
    SUBCASE("an unknown table, with the nearest known one") {
        std::string sentence = refusal("[pipeline]\nmodel='m'\n\n[expert]\n");
        CHECK(
            test::contains(sentence, "file.toml:4: unknown table [expert]; did you mean experts?"));
    }
    SUBCASE("an unknown key of [pipeline]") {
        std::string sentence = refusal("[pipeline]\nmodle='m'\n");
        CHECK(test::contains(sentence,
                             "file.toml:2: [pipeline] has no key 'modle'; did you mean model?"));
    }
    SUBCASE("no [pipeline]") { CHECK(test::contains(refusal("[trunk]\n"), "no [pipeline]")); }
    SUBCASE("a wrong type") {
        CHECK(test::contains(refusal("[pipeline]\nmodel = 3\n"),
                             "file.toml:2: [pipeline] model must be a"));
        CHECK(test::contains(refusal("[pipeline]\nmax_restarts = -1\n"), "from 0 to 1000"));
        CHECK(test::contains(refusal("[pipeline]\nmodel='m'\ntrunk = 3\n"), "file.toml"));
        CHECK(test::contains(refusal("[pipeline]\n[trunk]\nthreads = {a = 1}\n"),
                             "[trunk] threads must be"));
    }
    SUBCASE("a choice") {
        CHECK(test::contains(refusal("[pipeline]\npayload = 'smh'\n"), "did you mean shm?"));
        CHECK(test::contains(refusal("[pipeline]\n[trunk]\nrestart = 'always'\n"),
                             "on-failure, never"));
    }
    SUBCASE("an endpoint that nobody could be told") {
        CHECK(test::contains(refusal("[pipeline]\n[trunk]\nlisten = 'tcp://127.0.0.1:*'\n"),
                             "file.toml:3: [trunk] listen = 'tcp://127.0.0.1:*' names no port"));
        CHECK(test::contains(
            refusal("[pipeline]\n[trunk]\nendpoint = 'ipc://'\n"),
            "file.toml:3: [trunk] endpoint: endpoint \"ipc://\" names no socket file"));
    }
    SUBCASE("what stages of this kind or settings of any kind cannot have") {
        CHECK(test::contains(refusal("[pipeline]\n[sampler]\ncount = 2\n"),
                             "file.toml:3: [sampler] count: a pipeline has one sampler"));
        CHECK(
            test::contains(refusal("[pipeline]\n[trunk]\nhelp = true\n"), "help is not a setting"));
        CHECK(test::contains(
            refusal("[pipeline]\n[trunk]\nendpoint = 'ipc:///x'\nenv = { A = 'b' }\n"),
            "no effect"));
    }
    SUBCASE("an endpoint that is none") {
        CHECK(test::contains(refusal("[pipeline]\n[trunk]\nendpoint = '/tmp/x'\n"),
                             "has no known transport"));
    }
    SUBCASE("settings of a process that is not started") {
        CHECK(test::contains(refusal("[pipeline]\n[trunk]\nendpoint = 'ipc:///x'\nthreads = 2\n"),
                             "no effect"));
    }
    SUBCASE("what the launcher sets itself") {
        CHECK(
            test::contains(refusal("[pipeline]\n[trunk]\nrun_id = '3'\n"), "set by the launcher"));
    }
    SUBCASE("several gateways") {
        CHECK(test::contains(refusal("[pipeline]\n[[gateway]]\n[[gateway]]\n"),
                             "write [gateway] once"));
    }
    SUBCASE("two stages of one name") {
        CHECK(test::contains(refusal("[pipeline]\n[trunk]\nname='a'\n[experts]\nname='a'\n"),
                             "two stages are called 'a'"));
    }
    SUBCASE("an illegal name") {
        CHECK(test::contains(refusal("[pipeline]\nname = 'a b'\n"), "not a legal pipeline name"));
    }
    SUBCASE("an open quote in wrap") {
        CHECK(
            test::contains(refusal("[pipeline]\n[trunk]\nwrap = \"a 'b\"\n"), "open single quote"));
    }
}

TEST_CASE("with a placement every server that is started takes its share from it") {
    auto spec = parse(
        "[pipeline]\nmodel='m'\nplacement='p.placement'\n"
        "[[experts]]\n[[experts]]\nendpoint='tcp://10.0.0.2:7000'\n[[experts]]\nname='big'\n");
    REQUIRE_MESSAGE(spec.has_value(), spec.error().sentence());
    const auto servers = spec->of_kind(msg::ServiceKind::experts);
    CHECK(servers[0]->find("share")->values.front() == "@/some/where/p.placement#experts-0");
    CHECK(servers[1]->find("share") == nullptr);
    CHECK(servers[2]->find("share")->values.front() == "@/some/where/p.placement#big");
    CHECK(test::contains(refusal("[pipeline]\nplacement='p'\n[experts]\nshare='all'\n"),
                         "'experts' has a share, and [pipeline] a placement"));
    auto by_hand = parse("[pipeline]\n[experts]\nshare='@p#experts-1'\n");
    CHECK(by_hand->of_kind(msg::ServiceKind::experts)[0]->find("share")->values.front() ==
          "@/some/where/p#experts-1");
}

TEST_CASE("figures of a box stay with the launcher, its weight goes to the server") {
    auto spec = parse(
        "[pipeline]\nplacement='p'\n[[experts]]\nweight=3\ndisk_rate='3GB'\nmemory_rate="
        "40000000000\n"
        "link_rate='1.2GB'\nround_trip_us=100\n"
        "[[experts]]\nendpoint='tcp://10.0.0.2:7000'\nweight=2\nlink_rate='100MB'\n");
    REQUIRE_MESSAGE(spec.has_value(), spec.error().sentence());
    const auto servers = spec->of_kind(msg::ServiceKind::experts);
    CHECK(servers[0]->box.disk_rate == 3'000'000'000);
    CHECK(servers[0]->box.memory_rate == 40'000'000'000);
    CHECK(servers[0]->box.link_rate == 1'200'000'000);
    CHECK(servers[0]->box.round_trip_us == 100);
    CHECK(servers[0]->find("disk_rate") == nullptr);
    CHECK(servers[0]->find("weight")->values.front() == "3");
    CHECK(servers[1]->weight == 2);
    CHECK(servers[1]->find("weight") == nullptr);
    CHECK(test::contains(refusal("[pipeline]\n[experts]\nweight=0\n"), "weight must be"));
    CHECK(test::contains(refusal("[pipeline]\n[experts]\nlink_rate='0'\n"), "is no rate"));
}

TEST_CASE("servers weigh what the file says, else by their memory, else the same") {
    using Weights = std::vector<std::uint32_t>;
    const auto weights = [](const std::string& tables) {
        return server_weights(parse("[pipeline]\n" + tables).value());
    };
    CHECK(*weights("[[experts]]\nweight=7\n[[experts]]\nweight=2\ncache_bytes='1GiB'\n") ==
          Weights{7, 2});
    CHECK(*weights("[[experts]]\ncache_bytes='8GiB'\n[[experts]]\ncache_bytes='1MiB'\n") ==
          Weights{128, 1});
    CHECK(*weights("[[experts]]\ncache_bytes='8GiB'\n[[experts]]\n") == Weights{1, 1});
    const auto mixed = weights("[[experts]]\nweight=7\n[[experts]]\n");
    REQUIRE_FALSE(mixed.has_value());
    CHECK(test::contains(mixed.error().message, "'experts-1' has no weight"));
    CHECK_FALSE(weights("[[experts]]\ncache_bytes='much'\n").has_value());
}

TEST_CASE("a missing file, and a folder instead of a file, are refused by name") {
    auto missing = load_pipeline("/nonexistent/x.toml");
    REQUIRE_FALSE(missing.has_value());
    CHECK(test::contains(missing.error().message, "/nonexistent/x.toml does not exist"));
    auto folder = load_pipeline("/tmp");
    REQUIRE_FALSE(folder.has_value());
    CHECK(test::contains(folder.error().message, "is a directory"));
}
