// Pipelines whose stages are spread over several boxes: the same bytes as on one, and nothing left
// on any of them, however the launcher, the connection or a box ends.

#include <doctest/doctest.h>
#include <signal.h>
#include <sys/stat.h>

#include <filesystem>
#include <string>
#include <thread>
#include <vector>

#include "tests/support/boxes.h"
#include "tests/support/golden.h"
#include "tests/support/pipeline.h"

using namespace k3;
using namespace k3::test;

namespace {

constexpr std::uint32_t kTokens = 12;
constexpr std::int64_t kCleanMs = 10000;  // in which every box must be rid of a pipeline

msg::Submit request() {
    msg::Submit submit = of_ids({3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8}, kTokens);
    submit.ignore_eos = true;
    submit.want_logits = msg::WantLogits::all;
    return submit;
}

Answer answer_of(const Pipeline& pipeline) {
    Answer answer = pipeline.ask(request());
    REQUIRE_MESSAGE(!answer.error.has_value(), answer.error->sentence());
    REQUIRE(answer.ids.size() == kTokens);
    REQUIRE_FALSE(answer.logits.empty());
    return answer;
}

/// What one box computes.
const Answer& reference() {
    static const Answer answer = [] {
        World world;
        Pipeline pipeline(world, "one-box", golden_dir() / "tiny-k3", "");
        return answer_of(pipeline);
    }();
    return answer;
}

/// For pipelines with keys = 'boxes.keys'.
void make_keys(const World& world) {
    const auto file = world.write("keyed.toml", "[pipeline]\nkeys = 'boxes.keys'\n");
    REQUIRE(world.k3pipe({"keys", "-c", file.string()}).code == 0);
}

/// Tables that let `n` boxes run the programs of this build; of those only that `stages` name, if
/// there are any.
std::string hosts(std::size_t n, const std::string& stages = "") {
    std::string tables;
    for (std::size_t i = 0; i < n; ++i)
        if (stages.empty() ||
            stages.find("host = 'box" + std::to_string(i) + "'") != std::string::npos)
            tables += "[hosts.box" + std::to_string(i) + "]\nbinary = '" +
                      built("launcher/k3pipe").string() + "'\n";
    return tables;
}

}  // namespace

TEST_CASE("several boxes compute the same bytes as one" * doctest::skip(!boxes_can_be_made())) {
    const Answer& expected = reference();
    World world;
    Boxes boxes(world.path(), 3);
    make_keys(world);
    struct Spread {
        const char* name;
        std::string stages;
        const char* keys = "";
    };
    const std::string experts_on_two = "[[experts]]\nhost = 'box0'\n[[experts]]\nhost = 'box1'\n";
    for (const Spread& spread : {
             Spread{"experts-away", experts_on_two},
             Spread{"one-away", "[experts]\nhost = 'box0'\n[trunk]\nhost = 'box0'\n"},
             Spread{"trunk-away", "[[trunk]]\nhost = 'box0'\n[[trunk]]\nhost = 'box1'\n"},
             Spread{"all-but-gateway",
                    experts_on_two + "[[trunk]]\nhost = 'box2'\n[[trunk]]\nhost = 'box0'\n"
                                     "[tokenizer]\nhost = 'box1'\n[sampler]\nhost = 'box2'\n",
                    "keys = 'boxes.keys'\n"},
         }) {
        CAPTURE(spread.name);
        {
            Pipeline pipeline(world, spread.name, golden_dir() / "tiny-k3",
                              spread.stages + hosts(3, spread.stages),
                              boxes.pipeline_keys() + spread.keys);
            const Answer answer = answer_of(pipeline);
            CHECK(answer.ids == expected.ids);
            CHECK(answer.logits == expected.logits);
        }
        CHECK(boxes.all_clean(kCleanMs));
    }
}

TEST_CASE("a trunk and an expert server on the same other box use a fast lane, on two boxes not" *
          doctest::skip(!boxes_can_be_made())) {
    const Answer& expected = reference();
    World world;
    Boxes boxes(world.path(), 2);
    make_keys(world);
    struct Spread {
        const char* name;
        std::string stages;
        const char* keys;
        bool has_lanes;
    };
    const std::string experts = "[experts]\nhost = 'box0'\n";
    const std::string trunks = "[[trunk]]\nhost = 'box0'\n[[trunk]]\nhost = 'box0'\n";
    for (const Spread& spread : {
             Spread{"together", experts + trunks, "keys = 'boxes.keys'\n", true},
             Spread{"inline", experts + trunks, "payload = 'inline'\n", false},
             Spread{"apart", experts + "[[trunk]]\nhost = 'box1'\n[[trunk]]\nhost = 'box1'\n", "",
                    false},
         }) {
        CAPTURE(spread.name);
        Pipeline pipeline(world, spread.name, golden_dir() / "tiny-k3", spread.stages + hosts(2, spread.stages),
                          boxes.pipeline_keys() + spread.keys);
        const Answer answer = answer_of(pipeline);
        CHECK(answer.ids == expected.ids);
        CHECK(answer.logits == expected.logits);
        for (const char* trunk : {"trunk-0", "trunk-1"}) {
            CAPTURE(trunk);
            const std::uint64_t n_calls = pipeline.counter("expert_calls", trunk);
            CHECK(n_calls > 0);
            CHECK(pipeline.counter("expert_calls_fast_lane", trunk) ==
                  (spread.has_lanes ? n_calls : 0));
        }
        if (!spread.has_lanes) continue;
        // Also those that came later.
        for (const char* stage : {"experts", "trunk-0"}) {
            CAPTURE(stage);
            boxes.run(0, std::string("pkill -9 -o -f 'k3-(experts|trunk).*--name ") + stage + " '");
            REQUIRE(pipeline.complete_again(stage, 1));
            const std::uint64_t n_before = pipeline.counter("expert_calls_fast_lane", "trunk-1");
            CHECK(answer_of(pipeline).logits == expected.logits);
            CHECK(pipeline.counter("expert_calls_fast_lane", "trunk-0") > 0);
            CHECK(pipeline.counter("expert_calls_fast_lane", "trunk-1") > n_before);
        }
    }
    CHECK(boxes.all_clean(kCleanMs));
}

TEST_CASE("other boxes are handed the placement, and keep it for as long as their stage lives" *
          doctest::skip(!boxes_can_be_made())) {
    const Answer& expected = reference();
    World world;
    Boxes boxes(world.path(), 1);
    const std::string model = (golden_dir() / "tiny-k3").string();
    const std::string keys = boxes.pipeline_keys() + "placement = 'here/p'\n";
    const std::string stages =
        "[[experts]]\nhost = 'box0'\nweight = 2\n[[experts]]\nweight = 1\n[trunk]\nexpert_wait_ms "
        "= 3000\n" +
        hosts(1);
    // Both on the box, and with keys, which travel the same way.
    const std::filesystem::path file =
        world.write("away.toml", "[pipeline]\nmodel = '" + model + "'\n" + keys +
                                     "keys = 'boxes.keys'\n[[experts]]\nhost = 'box0'\n[[experts]]"
                                     "\nhost = 'box0'\n" +
                                     hosts(1));
    REQUIRE(world.k3pipe({"keys", "-c", file.string()}).code == 0);
    // The box has no such file.
    const std::filesystem::path here = world.path() / "here";
    std::filesystem::create_directory(here);
    boxes.run(0, "mount -t tmpfs none " + here.string());
    const std::string placement = (here / "p").string();

    Ended ended = world.k3pipe({"up", "-c", file.string()});
    CHECK(ended.code == 3);
    CHECK(has(ended.sentence(), placement));
    world.write("here/p", "experts-0 = everything\n");
    ended = world.k3pipe({"up", "-c", file.string()});
    CHECK(ended.code == 3);
    CHECK(has(ended.sentence(), "here/p is no file of k3pipe placement: it does not begin with"));

    std::filesystem::remove(placement);
    const std::filesystem::path other =
        world.write("other.toml", "[pipeline]\nmodel = '" + demo_model_dir().string() + "'\n" +
                                      boxes.pipeline_keys() + stages);
    ended = world.k3pipe({"placement", "-c", other.string(), "--out", placement});
    REQUIRE_MESSAGE(ended.code == 0, ended.err);
    ended = world.k3pipe({"up", "-c", file.string()});
    CHECK(ended.code == 3);
    CHECK(has(ended.err, "/placement places the experts of the checkpoint with fingerprint"));
    std::filesystem::remove(placement);

    const auto place = [&](const std::string& tables) {
        const std::string plain =
            world.write("plain.toml", "[pipeline]\nmodel = '" + model + "'\n" + tables).string();
        REQUIRE(world.k3pipe({"placement", "-c", plain, "--out", placement}).code == 0);
    };
    place("[[experts]]\nweight = 2\n[[experts]]\nweight = 1\n");
    {
        Pipeline pipeline(world, "placed", golden_dir() / "tiny-k3", stages, keys);
        CHECK(answer_of(pipeline).logits == expected.logits);
        CHECK(boxes.run(0, "ls " + here.string()).empty());
        CHECK(pipeline.counter("experts_held", "experts-0") ==
              2 * pipeline.counter("experts_held", "experts-1"));
        // The box is handed what was there at the start, whatever has become of the file.
        place("[[experts]]\nweight = 1\n[[experts]]\nweight = 2\n");
        boxes.run(0, "pkill -9 -x k3-experts");
        REQUIRE(pipeline.complete_again("experts-0", 1));
        CHECK(answer_of(pipeline).logits == expected.logits);
        // A server here reads the file. Two halves of different placements are no whole.
        std::filesystem::remove(placement);
        place("[[experts]]\nweight = 3\n[[experts]]\nweight = 1\n");
        ::kill(static_cast<pid_t>(pipeline.stage("experts-1").pid), SIGKILL);
        REQUIRE(pipeline.complete_again("experts-1", 1));
        const Answer answer = pipeline.ask(request());
        REQUIRE(answer.error.has_value());
        CHECK(has(answer.error->sentence(), "came back with another share or placement"));
        CHECK(has(answer.error->sentence(), "experts are held by nobody"));
        CHECK(pipeline.program().says("start it with the former one, or the whole pipeline"));
    }
    CHECK(boxes.all_clean(kCleanMs));
}

namespace {

const std::string kExpertsAway = "[experts]\nhost = 'box0'\n";
const std::string kBothAway = kExpertsAway + "[trunk]\nhost = 'box1'\nthreads = 1\n";
const std::string kPrompt = "Once upon a time there was a";
constexpr std::uint32_t kLong = 300;

std::filesystem::path write_demo(const World& world, const Boxes& boxes,
                                 const std::string& stages) {
    return world.write("demo.toml", "[pipeline]\nname = 'demo'\nmodel = '" +
                                        demo_model_dir().string() + "'\n" + boxes.pipeline_keys() +
                                        stages);
}

/// A client in a process of its own, so that its stream can be watched while it runs.
Program start_client(const World& world) {
    return world.start({"run", "--attach", "demo", "-p", kPrompt, "--max-tokens",
                        std::to_string(kLong), "--ignore-eos"});
}

/// What an undisturbed client prints.
std::string text_of(const Pipeline& pipeline) {
    msg::Submit submit = of_text(kPrompt, kLong);
    submit.ignore_eos = true;
    const Answer answer = pipeline.ask(submit);
    REQUIRE_MESSAGE(!answer.error.has_value(), answer.error->sentence());
    return answer.text;
}

void kill_ssh(const Pipeline& pipeline, const std::string& stage) {
    const auto pid = static_cast<pid_t>(pipeline.stage(stage).pid);
    REQUIRE(pid > 0);
    ::kill(pid, SIGKILL);
}

}  // namespace

TEST_CASE("a launcher that is killed leaves nothing on any box" *
          doctest::skip(!boxes_can_be_made())) {
    World world;
    Boxes boxes(world.path(), 2);
    const std::filesystem::path file = write_demo(world, boxes, kBothAway + hosts(2));
    for (const char* phase : {"starting pipeline", "trunk started", "gateway started"}) {
        CAPTURE(phase);
        Program up = world.start({"up", "-c", file.string()});
        REQUIRE_MESSAGE(up.says(phase), up.err());
        up.signal(SIGKILL);
        up.wait();
        CHECK(boxes.all_clean(kCleanMs));
    }
    {  // and a box loses its power with it
        Program up = world.start({"up", "-c", file.string()});
        REQUIRE_MESSAGE(up.says("trunk started"), up.err());
        boxes.power_off(1);
        up.signal(SIGKILL);
        up.wait();
        boxes.power_on(1);
        CHECK(boxes.all_clean(kCleanMs));
    }
    Pipeline pipeline(world, "demo", demo_model_dir(), kBothAway + hosts(2), boxes.pipeline_keys());
    const std::string text = text_of(pipeline);
    Program client = start_client(world);
    REQUIRE_MESSAGE(client.prints(text.substr(0, 40)), client.err());
    pipeline.given_up();
    pipeline.program().signal(SIGKILL);
    pipeline.program().wait();
    CHECK(client.wait().code != 0);
    CHECK(boxes.all_clean(kCleanMs));
}

TEST_CASE("the far end of a connection without a launcher ends by itself") {
    World world;
    const Ended ended = world.k3pipe({"host-stage"});
    CHECK(ended.code == 5);
    CHECK(has(ended.err, "the launcher hung up before it had said what to start"));
}

TEST_CASE("a connection that is cut: the stage is started again and the text stays the same" *
          doctest::skip(!boxes_can_be_made())) {
    World world;
    Boxes boxes(world.path(), 1);
    {
        Pipeline pipeline(world, "demo", demo_model_dir(),
                          kExpertsAway + "[trunk]\nthreads = 1\n" + hosts(1),
                          boxes.pipeline_keys());
        const std::string text = text_of(pipeline);
        Program client = start_client(world);
        REQUIRE_MESSAGE(client.prints(text.substr(0, 40)), client.err());
        kill_ssh(pipeline, "experts");
        const Ended ended = client.wait();
        CHECK_MESSAGE(ended.code == 0, ended.err);
        CHECK(ended.out == text);
        CHECK(pipeline.complete_again("experts", 1));
        CHECK(pipeline.stage("experts").host == "box0");
        const Ended status = world.k3pipe({"status"});
        CHECK(status.code == 0);
        CHECK(has(status.out, "tcp://10.77.0.10:5802 on box0"));
        const Ended plan = world.k3pipe({"plan", "-c", (world.path() / "demo.toml").string(),
                                         "--memory-rate", "1GB", "--disk-rate", "1GB"});
        CHECK_MESSAGE(plan.code == 0, plan.err);
        CHECK(has(plan.out, "# experts, on box0\nk3-experts --listen tcp://10.77.0.10:5802"));
        CHECK(has(plan.out, "--experts tcp://10.77.0.10:5802"));
        // The service itself, and the process that holds it.
        for (const char* victim : {"k3-experts", "k3pipe"}) {
            CAPTURE(victim);
            const std::uint32_t restarts = pipeline.stage("experts").restarts;
            boxes.run(0, std::string("pkill -9 -o -x ") + victim);
            CHECK(pipeline.complete_again("experts", restarts + 1));
            CHECK(text_of(pipeline) == text);
        }
        CHECK(pipeline.program().says("experts ended with signal 9 (Killed); restart"));
    }
    CHECK(boxes.all_clean(kCleanMs));
}

TEST_CASE("a cable is pulled, a box loses its power: both ends notice, and all comes back" *
          doctest::skip(!boxes_can_be_made())) {
    World world;
    Boxes boxes(world.path(), 2);
    const std::string stages =
        "[[experts]]\nhost = 'box0'\n[[experts]]\nhost = 'box1'\n"
        "[trunk]\nthreads = 1\n";
    {
        Pipeline pipeline(world, "demo", demo_model_dir(), stages + hosts(2),
                          boxes.pipeline_keys() + "max_restarts = 50\n");
        const std::string text = text_of(pipeline);
        Program client = start_client(world);
        REQUIRE_MESSAGE(client.prints(text.substr(0, 40)), client.err());
        boxes.pull_cable(0);
        boxes.power_off(1);
        boxes.power_on(1);
        // Nobody has told box 0, and it is rid of the stage all the same.
        const Deadline noticed = Deadline::after_ms(kCleanMs);
        while (!boxes.leftovers(0).empty() && !noticed.expired())
            std::this_thread::sleep_for(std::chrono::milliseconds(50));
        CHECK(boxes.leftovers(0).empty());
        boxes.plug_in(0);
        // How often it was tried meanwhile does not matter.
        const Deadline back = Deadline::after_ms(30000);
        while (world.record("demo")->state != "ready" && !back.expired())
            std::this_thread::sleep_for(std::chrono::milliseconds(20));
        CHECK(world.record("demo")->state == "ready");
        CHECK(pipeline.stage("experts-0").restarts > 0);
        CHECK(pipeline.stage("experts-1").restarts > 0);
        // Whether the request outlived this or not: no wrong text.
        CHECK(text.starts_with(client.wait().out));
        CHECK(text_of(pipeline) == text);
    }
    CHECK(boxes.all_clean(kCleanMs));
}

TEST_CASE("what keeps boxes from starting is said of all of them at once" *
          doctest::skip(!boxes_can_be_made())) {
    World world;
    Boxes boxes(world.path(), 3);
    std::filesystem::remove(boxes.disk(0) / "authorized_keys");
    boxes.run(1,
              "setsid -f python3 -c \"import socket, time; s = socket.socket(); "
              "s.bind(('10.77.0.11', 5803)); s.listen(); time.sleep(60)\" >/dev/null 2>&1; "
              "until grep -q :16AB /proc/net/tcp; do sleep 0.02; done");
    const std::string settings = read_file(boxes.ssh_settings());
    world.write("ssh_config", "Host box2\n  UserKnownHostsFile none\n" + settings);
    const std::filesystem::path file =
        write_demo(world, boxes,
                   "[[experts]]\nhost = 'box0'\n[[experts]]\nhost = 'box1'\nmodel = '/no/model'\n"
                   "[[experts]]\nhost = 'box2'\n[[experts]]\nhost = '10.77.0.1'\n" +
                       hosts(3));
    const Ended ended = world.k3pipe({"up", "-c", file.string()});
    CHECK(ended.code != 0);
    CHECK(has(ended.err, "host box0 does not let us in"));
    CHECK(has(ended.err, "host box1: /no/model has no config.json"));
    CHECK(has(ended.err, "host box1: tcp://10.77.0.11:5803, the endpoint of experts-1, is taken"));
    CHECK(has(ended.err, "the host key of box2 is not known here"));
    CHECK(has(ended.err, "host 10.77.0.1 cannot be reached"));
    CHECK(has(ended.sentence(), "5 things keep other boxes from starting their stages"));
    CHECK_FALSE(ended.err.find(" started (") != std::string::npos);
}

TEST_CASE("a box without k3pipe is given it once, and whole or not at all" *
          doctest::skip(!boxes_can_be_made())) {
    World world;
    Boxes boxes(world.path(), 1);
    const std::filesystem::path cache = boxes.disk(0) / "home/.cache/k3pipe";
    const std::filesystem::path file = write_demo(world, boxes, kExpertsAway);
    auto copies = [&cache] {
        std::size_t n = 0;
        for ([[maybe_unused]] const auto& entry : std::filesystem::directory_iterator(cache)) ++n;
        return n;
    };
    // A connection that changes bytes.
    const std::filesystem::path bad =
        world.write("bad-ssh.toml", "#!/bin/sh\nsed 's/GNU/GNX/g' | ssh -F " +
                                        boxes.ssh_settings().string() + " \"$@\"\n");
    ::chmod(bad.c_str(), 0755);
    const std::filesystem::path damaged = world.write(
        "damaged.toml", "[pipeline]\nmodel = '" + demo_model_dir().string() +
                            "'\ninsecure = true\nssh = '" + bad.string() + "'\n" + kExpertsAway);
    Ended ended = world.k3pipe({"up", "-c", damaged.string()});
    CHECK(ended.code != 0);
    CHECK(has(ended.sentence(), "did NOT match"));
    CHECK(copies() == 0);

    const std::vector<std::string> ask = {
        "run", "-c", file.string(), "-p", "The capital of France is", "--max-tokens", "1"};
    ended = world.k3pipe(ask);
    CHECK_MESSAGE(ended.out == " Paris", ended.err);
    CHECK(has(ended.err, "copying 2 programs"));
    CHECK(copies() == 1);
    ended = world.k3pipe(ask);
    CHECK_MESSAGE(ended.out == " Paris", ended.err);
    CHECK(ended.err.find("copying") == std::string::npos);
    CHECK(boxes.all_clean(kCleanMs));

    const std::filesystem::path ldd =
        world.write("ldd.toml", "#!/bin/sh\necho '\tlibzmq.so.5 => not found'\n");
    ::chmod(ldd.c_str(), 0755);
    boxes.run(0, "mount --bind " + ldd.string() + " /usr/bin/ldd");
    ended = world.k3pipe(ask);
    CHECK(
        has(ended.sentence(), "host box0 lacks what our programs need: libzmq.so.5 => not found"));
}
