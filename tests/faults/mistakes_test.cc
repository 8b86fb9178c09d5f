// Mistakes that people make with commands and pipeline files: one sentence, one exit code, whatever
// the command.

#include <doctest/doctest.h>
#include <signal.h>
#include <unistd.h>

#include <filesystem>
#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "common/transport/curve_keys.h"
#include "launcher/pipeline_keys.h"
#include "launcher/run_directory.h"
#include "tests/faults/refusal.h"
#include "tests/support/checkpoint_copy.h"
#include "tests/support/golden.h"
#include "tests/support/pipeline.h"
#include "tests/support/text.h"

using namespace k3;
using namespace k3::test;
namespace fs = std::filesystem;

namespace {

fs::path tiny() { return golden_dir() / "tiny-k3"; }

/// What a command says of a mistake: the sentence, or the finding and remedy of `doctor`.
std::string said(const Ended& ended) {
    const std::size_t at = ended.out.find("FAILS ");
    return at == std::string::npos ? ended.sentence() : ended.out.substr(at);
}

/// An ssh that runs everything here, after saying that it was asked.
std::string fake_ssh(const World& world, const std::string& first) {
    const fs::path path = world.write(
        "ssh.toml", "#!/bin/sh\nfor word; do :; done\n" + first + "\nexec sh -c \"$word\"\n");
    fs::permissions(path, fs::perms::owner_all);
    return path.string();
}

/// Expert servers on a box that the fake ssh takes for this one.
std::string on_a_box(const World& world, const std::string& ssh, const std::string& table = "") {
    return world
        .write("box.toml", "[pipeline]\nname = 'box'\nmodel = '" + tiny().string() + "'\nssh = '" +
                               ssh +
                               "'\ninsecure = true\naddress = '127.0.0.1'\n"
                               "[experts]\nhost = 'other'\n[hosts.other]\naddress = '127.0.0.1'\n" +
                               table)
        .string();
}

}  // namespace

TEST_CASE("what a service would refuse is refused alike by all that look at its settings") {
    World world;
    world.write("sessions.toml", "");
    const std::map<std::string, std::string> mistakes = {
        {"[trunk]\nthreads = 9999\n", "trunk: k3-trunk: --threads: '9999' is not a whole number"},
        {"[trunk]\nsession_dir = 'sessions.toml'\n", "is to keep sessions and is not a directory"},
        {"[experts]\npolicy = 'lur'\n", "experts: k3-experts: --policy: 'lur' is not one of"},
        {"[sampler]\ncores = '0-9999'\n", "sampler: core"},
        {"[gateway]\nmax_request = 2\n", "gateway: k3-gateway: unknown setting --max-request"},
        {"[experts]\nenv = { K3_ISA = 'sse9' }\n", "K3_ISA is 'sse9'"}};
    for (const auto& [stages, sentence] : mistakes) {
        const std::string file = pipeline_of(world, tiny(), stages);
        for (const std::vector<std::string>& command :
             std::vector<std::vector<std::string>>{{"run", "--ids", "1", "-c", file},
                                                   {"up", "-c", file},
                                                   {"plan", "-c", file},
                                                   {"doctor", "-c", file},
                                                   {"render", "systemd", "-c", file}}) {
            const Ended ended = world.k3pipe(command);
            CHECK_MESSAGE(ended.code == 2, (command.front() + stages + ended.err));
            CHECK_MESSAGE(contains(said(ended), sentence), (command.front() + said(ended)));
            CHECK(contains(said(ended), file + ":"));
        }
    }
    // And what is right, too.
    CHECK(contains(world.k3pipe({"doctor", "-c", pipeline_of(world, tiny())}).out,
                   "every service accepts its own"));
    // Of a service itself: no more than a look.
    const std::string socket = "ipc://" + (world.path() / "s.sock").string();
    Program look = world.start_program(
        {built("services/sampler/k3-sampler").string(), "--listen", socket, "--check"});
    CHECK(look.wait().code == 0);
    CHECK_FALSE(fs::exists(world.path() / "s.sock"));
}

TEST_CASE("a checkpoint that is none is the same sentence and code from every command") {
    World world;
    fs::create_directory(world.path() / "empty");
    fs::create_directory(world.path() / "file.toml.d");
    world.write("file.toml", "no directory");
    const std::map<std::string, std::string> mistakes = {
        {"missing", "missing does not exist"},
        {"file.toml", "file.toml is not a directory"},
        {"empty", "empty has no config.json"}};
    for (const auto& [name, sentence] : mistakes) {
        const std::string model = (world.path() / name).string();
        const std::string file = pipeline_of(world, model);
        std::vector<std::vector<std::string>> commands = {
            {"run", "--ids", "1", "-c", file},
            {"up", "-c", file},
            {"plan", "-c", file},
            {"placement", "-c", file},
            {"render", "systemd", "-c", file},
            {"init", model},
            {"pack", "trunk", model, (world.path() / "out").string()}};
        if (name != "file.toml") commands.push_back({"verify", model});  // a file may be a pack
        for (const auto& command : commands) {
            const Ended ended = world.k3pipe(command);
            CHECK(ended.code == 3);
            CHECK_MESSAGE(ended.sentence() == "checkpoint directory " +
                                                  (world.path() / sentence).string() +
                                                  "; name the directory that holds config.json and "
                                                  "model.safetensors.index.json",
                          command.front());
        }
        for (const std::vector<std::string>& command :
             std::vector<std::vector<std::string>>{{"doctor", model}, {"doctor", "-c", file}}) {
            const Ended ended = world.k3pipe(command);
            CHECK(ended.code == 3);
            CHECK_MESSAGE(contains(ended.out, "checkpoint directory " +
                                                  (world.path() / sentence).string() + "\n"),
                          ended.out);
        }
    }
}

TEST_CASE("a pipeline file with what can hardly be meant is refused with its line") {
    World world;
    const auto refusal = [&](const std::string& stages) {
        const Ended ended = world.k3pipe({"plan", "-c", pipeline_of(world, tiny(), stages)});
        CHECK_MESSAGE(ended.code == 2, (stages + ended.err));
        return ended.sentence();
    };
    CHECK(contains(refusal("[hosts.laptpo]\nmodel = '/m'\n[experts]\nhost = 'laptop'\n"),
                   "no stage has host = 'laptpo'; did you mean laptop?"));
    CHECK(contains(refusal("[hosts.laptop]\nmodel = '/m'\n"),
                   "no stage has host = 'laptop'; give a stage that host, or remove the table"));
    CHECK(contains(refusal("[trunk]\npack = []\n"), "[trunk] pack is an empty list"));
    CHECK(contains(refusal("[trunk]\npack = ''\n"), "[trunk] pack is empty"));
    CHECK(contains(refusal("[trunk]\npack = ['a', '']\n"), "[trunk] pack is empty"));
    CHECK(contains(refusal("[experts]\nmodel = ''\n"), "[experts] model is empty"));
    CHECK(contains(refusal("[sampler]\nbinary = ''\n"), "[sampler] binary is empty"));
    CHECK(contains(refusal("[sampler]\nlisten = 'ipc://here.sock'\n"),
                   "write its path from the root: ipc:///folder/name.sock"));
    CHECK(contains(refusal("[trunk]\ncheck = true\n"), "check is not a setting"));
    // Not a mistake: no sessions.
    CHECK(world.k3pipe({"plan", "-c", pipeline_of(world, tiny(), "[trunk]\nsession_dir = ''\n")})
              .code == 0);
}

TEST_CASE("ports that do not exist are refused before anybody is asked") {
    World world;
    std::string stages = "[hosts.other]\naddress = '127.0.0.1'\n";
    for (int i = 0; i < 3; ++i) stages += "[[experts]]\ncount = 200\nhost = 'other'\n";
    const std::string file =
        world
            .write("p.toml", "[pipeline]\nmodel = '" + tiny().string() +
                                 "'\nssh = 'true'\ninsecure = true\nport_base = 65000\n" + stages)
            .string();
    const Ended ended = world.k3pipe({"plan", "-c", file});
    CHECK(ended.code == 2);
    CHECK_MESSAGE(
        contains(ended.sentence(), "would listen at port 65536, and the last one is 65535"),
        ended.err);
    CHECK(contains(ended.sentence(), "set port_base in [pipeline] to 64999 or less"));
}

TEST_CASE("a simulation of nothing is refused before anything is measured") {
    World world;
    const std::string file = pipeline_of(world, tiny());
    const std::string empty = world.write("empty.csv", "").string();
    const std::string names = world.write("names.csv", "position,layer,rank0\n").string();
    const auto refusal = [&](std::vector<std::string> flags, int code) {
        flags.insert(flags.begin(), {"plan", "-c", file});
        const Ended ended = world.k3pipe(flags);
        CHECK(ended.code == code);
        CHECK(ended.out.empty());
        return ended.sentence();
    };
    CHECK(contains(refusal({"--simulate", "/no/such.csv"}, 3), "cannot open /no/such.csv"));
    for (const std::string& trace : {empty, names})
        CHECK(contains(refusal({"--simulate", trace}, 3), trace + " holds no routing"));
    CHECK(contains(refusal({"--simulate", names, "--rows", "0"}, 2),
                   "'0' is not a whole number from 1"));
    CHECK(contains(refusal({"--simulate", names, "--boxes", "0"}, 2),
                   "'0' is not a whole number from 1 to 64"));
    const Ended placed = world.k3pipe({"placement", "-c", file, "--trace", empty});
    CHECK(placed.code == 3);
    CHECK(contains(placed.sentence(), "holds no routing"));
    const Ended parts = world.k3pipe(
        {"pack", "trunk", tiny().string(), (world.path() / "out").string(), "--part", "2/2"});
    CHECK(parts.code == 2);
    CHECK(contains(parts.sentence(), "is not I/N with I from 0 to N-1"));
    const Ended named = world.k3pipe({"run", "-c", file, "--ids", "1", "--save-session", "a:b"});
    CHECK(named.code == 2);
    CHECK(contains(named.sentence(), "use 1 to 100 letters, digits, - _ and ."));
}

TEST_CASE("an image's place among the ids is refused, whoever has put it there") {
    World world;
    const auto config = nlohmann::json::parse(read_file(tiny() / "config.json"));
    const std::string id = std::to_string(config.at("media_placeholder_token_id").get<int>());
    const Ended ended = world.k3pipe({"run", "-c", pipeline_of(world, tiny()), "--ids", "1," + id});
    CHECK(ended.code == 2);
    CHECK(contains(ended.sentence(), "the placeholder of an image"));
    CHECK(
        contains(ended.sentence(), "if the model has chosen that token itself, ask with another"));
}

TEST_CASE("status tells a stage between two processes, and keys that are not the pipeline's") {
    World world;
    const fs::path keys = world.path() / "keys";
    REQUIRE(launcher::make_key_file(keys, false).has_value());
    {
        // As a launcher leaves it that has just noticed that a process was killed. Somebody
        // answers.
        auto directory = launcher::RunDirectory::acquire(world.base(), "p");
        REQUIRE(directory.has_value());
        const std::string socket = "ipc://" + ((*directory)->path() / "sampler.sock").string();
        Program sampler = world.start_program(
            {built("services/sampler/k3-sampler").string(), "--listen", socket});
        REQUIRE(sampler.says("ready listen="));
        launcher::RunRecord record;
        record.name = "p";
        record.pid = ::getpid();
        record.run_id = "1";
        record.state = "degraded";
        record.keys = keys.string();
        record.keys_fingerprint = "0000-0000";
        record.stages.push_back({.kind = "sampler",
                                 .name = "sampler",
                                 .endpoint = socket,
                                 .host = "",
                                 .client = "",
                                 .state = "backing off",
                                 .detail = ""});
        REQUIRE((*directory)->write(record).has_value());
        const Ended shown = world.k3pipe({"status"});
        CHECK(shown.code == 5);
        CHECK_MESSAGE(contains(shown.out, "sampler        restarting          -"), shown.out);
        CHECK(contains(shown.out, "has been replaced since the start (0000-0000 then, "));
        const auto parsed = nlohmann::json::parse(world.k3pipe({"status", "--json"}).out)[0];
        CHECK(parsed["keys_replaced"] == true);
        CHECK(parsed["stages"][0]["state"] == "restarting");
        CHECK(parsed["stages"][0]["answers"] == false);

        // With its process, and the right keys.
        record.stages[0].pid = sampler.pid();
        record.stages[0].state = "ready";
        record.state = "ready";
        record.keys_fingerprint = (*transport::CurveKeys::load(keys.string()))->fingerprint();
        REQUIRE((*directory)->write(record).has_value());
        const Ended ready = world.k3pipe({"status"});
        CHECK(ready.code == 0);
        CHECK(contains(ready.out, "sampler        ready"));
        CHECK_FALSE(contains(ready.out, "replaced"));
        sampler.signal(SIGTERM);
        CHECK(sampler.wait().code == 0);
    }
}

TEST_CASE("Ctrl-C while other boxes are asked: up has stopped, run was interrupted") {
    World world;
    const std::string asked = (world.path() / "asked.toml").string();
    const std::string file =
        on_a_box(world, fake_ssh(world, "echo asked > '" + asked + "'\nexec sleep 600"));
    for (const auto& [command, code] : std::vector<std::pair<std::vector<std::string>, int>>{
             {{"up", "-c", file}, 0}, {{"run", "--ids", "1", "-c", file}, 130}}) {
        fs::remove(asked);
        Program program = world.start(command);
        const Deadline deadline = Deadline::after_ms(30000);
        while (!fs::exists(asked) && !deadline.expired()) ::usleep(5000);
        REQUIRE(fs::exists(asked));
        program.signal(SIGINT);
        const Ended ended = program.wait(20000);
        CHECK_MESSAGE(ended.code == code, ended.err);
        CHECK(contains(ended.err, code == 0 ? "stopped before anything was started" : ""));
    }
}

TEST_CASE("a program of another box that is wrong is named, with one exit code") {
    World world;
    const std::string ssh = fake_ssh(world, "");
    const fs::path plain = world.write("plain.toml", "no program");
    const fs::path other = world.write("other.toml", "#!/bin/sh\necho k3pipe 0.0.1\n");
    fs::permissions(other, fs::perms::owner_all);
    const std::map<std::string, std::string> mistakes = {
        {"/no/such/k3pipe", "binary /no/such/k3pipe does not exist"},
        {plain.string(), "binary " + plain.string() + " cannot be executed"},
        {"/bin/true", "binary /bin/true is no k3pipe"},
        {other.string(), "binary " + other.string() + " is k3pipe 0.0.1, and this one k3pipe "}};
    for (const auto& [binary, sentence] : mistakes) {
        const std::string file = on_a_box(world, ssh, "binary = '" + binary + "'\n");
        const Ended ended = world.k3pipe({"up", "-c", file});
        CHECK_MESSAGE(ended.code == 2, ended.err);
        CHECK_MESSAGE(contains(ended.sentence(), "host other: " + sentence), ended.err);
        CHECK(contains(ended.sentence(), "correct binary in [hosts.\"other\"]"));
    }
}
