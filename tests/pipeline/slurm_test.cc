// Pipelines in the jobs of a Slurm cluster: the same bytes as on one box, stages where the rule
// says, nothing left of job or steps however the launcher or the job ends, and clear words when
// Slurm cannot or will not.

#include <doctest/doctest.h>
#include <signal.h>
#include <sys/stat.h>

#include <filesystem>
#include <fstream>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "tests/support/boxes.h"
#include "tests/support/golden.h"
#include "tests/support/pipeline.h"
#include "tests/support/slurm_cluster.h"

using namespace k3;
using namespace k3::test;

namespace {

constexpr std::uint32_t kTokens = 16;
constexpr std::int64_t kGoneMs = 10000;  // in which job and steps must be gone
constexpr std::int64_t kSoonMs = 30000;

const std::string kThree = "[[experts]]\n[[experts]]\n[trunk]\nthreads = 1\n";
const std::string kInsecure = "insecure = true\n";

Answer answer_of(const Pipeline& pipeline) {
    msg::Submit submit = of_text("The capital of France is", kTokens);
    submit.ignore_eos = true;
    submit.want_logits = msg::WantLogits::all;
    const Answer answer = pipeline.ask(submit);
    REQUIRE_MESSAGE(!answer.error.has_value(), answer.error->sentence());
    REQUIRE(answer.ids.size() == kTokens);
    REQUIRE_FALSE(answer.logits.empty());
    return answer;
}

/// What one box computes.
const Answer& reference() {
    static const Answer answer = [] {
        World world;
        Pipeline pipeline(world, "one-box", demo_model_dir(), "");
        return answer_of(pipeline);
    }();
    return answer;
}

std::filesystem::path write_demo(const World& world, const std::string& stages,
                                 const std::string& keys = kInsecure) {
    return world.write("demo.toml", "[pipeline]\nname = 'demo'\nmodel = '" +
                                        demo_model_dir().string() + "'\n" + keys + stages);
}

std::vector<std::string> asks(const std::filesystem::path& file) {
    return {"run",          "--slurm", "-c", file.string(), "-p", "The capital of France is",
            "--max-tokens", "1"};
}

bool is_gone(const Boxes& boxes) {
    const bool no_job = SlurmCluster::has_no_job(kGoneMs);
    return boxes.all_clean(kGoneMs) && no_job;
}

}  // namespace

TEST_CASE("a Slurm job of three nodes computes the same bytes as one box" *
          doctest::skip(!slurm_can_be_run())) {
    const Answer& expected = reference();
    World world;
    Boxes boxes(world.path(), 3);
    SlurmCluster slurm(world, boxes, 3);
    const std::filesystem::path keyed =
        world.write("keyed.toml", "[pipeline]\nkeys = 'nodes.keys'\n");
    REQUIRE(world.k3pipe({"keys", "-c", keyed.string()}).code == 0);
    {
        Pipeline pipeline(world, "demo", demo_model_dir(), kThree, "keys = 'nodes.keys'\n",
                          {"--slurm"});
        const Answer answer = answer_of(pipeline);
        CHECK(answer.text == expected.text);
        CHECK(answer.logits == expected.logits);
        CHECK(has(pipeline.program().err(), "box0: experts-0; box1: experts-1; box2: trunk"));
        CHECK(slurm.run("squeue --noheader --format='%.12j %D %t'") == "k3pipe-demo- 3 R\n");
        CHECK(slurm.run("squeue --noheader --steps --format=%N | sort") == "box0\nbox1\nbox2\n");
        const Ended status = world.k3pipe({"status"});
        CHECK(has(status.out, "tcp://10.77.0.12:5804 on box2"));
        CHECK(has(status.out, "srun"));
        CHECK(pipeline.stage("gateway").host.empty());
        CHECK(world.k3pipe({"down"}).code == 0);
        pipeline.given_up();
        CHECK(pipeline.program().wait().code == 0);
    }
    CHECK(is_gone(boxes));
}

TEST_CASE("inside a job its nodes are used, as many as there are, and it is not given back" *
          doctest::skip(!slurm_can_be_run())) {
    const Answer& expected = reference();
    World world;
    Boxes boxes(world.path(), 2);
    SlurmCluster slurm(world, boxes, 2);
    const std::string k3pipe = built("launcher/k3pipe").string();
    const std::string file = write_demo(world, kThree).string();
    // Two nodes for three stages, then one node of a job without all its cores, twice.
    const std::string ask = k3pipe + " run --slurm -c " + file +
                            " -p 'The capital of France is' --ignore-eos --max-tokens " +
                            std::to_string(kTokens);
    Ended ended =
        world.start_program({"/usr/bin/salloc", "--quiet", "--nodes=2", "sh", "-c", ask}).wait();
    CHECK_MESSAGE(ended.out == expected.text, ended.err);
    CHECK(has(ended.err, "box0: experts-0 trunk; box1: experts-1"));
    ended =
        world
            .start_program({"/usr/bin/salloc", "--quiet", "--ntasks=3", "--nodes=1", "--mem=300",
                            "sh", "-c", ask + " && squeue --noheader --format=%t >&2 && " + ask})
            .wait();
    CHECK_MESSAGE(ended.out == expected.text + expected.text, ended.err);
    CHECK(has(ended.err, "box0: experts-0 experts-1 trunk"));
    CHECK(has(ended.err, "\nR\n"));
    // One that is smaller than what the file asks for.
    const std::string larger = write_demo(world, kThree + "[slurm]\nnodes = 2\n").string();
    ended = world
                .start_program({"/usr/bin/salloc", "--quiet", "--nodes=1", k3pipe, "up", "--slurm",
                                "-c", larger})
                .wait();
    CHECK(ended.code == 2);
    CHECK(has(ended.sentence(), "has 1 node, and [slurm] in " + larger + " asks for 2"));
    CHECK(is_gone(boxes));
}

TEST_CASE("a launcher that is killed leaves neither job nor steps" *
          doctest::skip(!slurm_can_be_run())) {
    World world;
    Boxes boxes(world.path(), 2);
    SlurmCluster slurm(world, boxes, 2);
    const std::string file = write_demo(world, kThree + "[slurm]\nnodes = 2\n").string();
    const std::string waiting =
        world
            .write("waiting.toml", "[pipeline]\nmodel = '" + demo_model_dir().string() + "'\n" +
                                       kInsecure + kThree +
                                       "[slurm]\npartition = 'closed'\n"
                                       "nodes = 1\n")
            .string();
    struct Phase {
        std::string file;
        const char* says;
    };
    for (const Phase& phase : {Phase{waiting, "waits for its nodes"}, Phase{file, "Slurm job"},
                               Phase{file, "trunk started"}, Phase{file, "' is ready after"}}) {
        CAPTURE(phase.says);
        Program up = world.start({"up", "--slurm", "-c", phase.file});
        REQUIRE_MESSAGE(up.says(phase.says), up.err());
        up.signal(SIGKILL);
        up.wait();
        CHECK(is_gone(boxes));
    }
    // In a job of somebody else only the steps end.
    const std::filesystem::path hold = world.path() / "hold";
    REQUIRE(::mkfifo(hold.c_str(), 0600) == 0);
    Program other = world.start_program(
        {"/usr/bin/salloc", "--quiet", "--nodes=2", "sh", "-c",
         built("launcher/k3pipe").string() + " up --slurm -c " + file + "; cat " + hold.string()});
    REQUIRE_MESSAGE(other.says("' is ready after"), other.err());
    ::kill(static_cast<pid_t>(world.record("demo")->pid), SIGKILL);
    CHECK(boxes.all_clean(kGoneMs));
    CHECK(slurm.run("squeue --noheader --format=%t") == "R\n");
    std::ofstream(hold).close();
    other.wait();
    CHECK(is_gone(boxes));
}

TEST_CASE("Ctrl-C ends the wait for nodes and cancels the job" *
          doctest::skip(!slurm_can_be_run())) {
    World world;
    Boxes boxes(world.path(), 1);
    SlurmCluster slurm(world, boxes, 1);
    const std::string file =
        write_demo(world, "[slurm]\nnodes = 1\npartition = 'closed'\n").string();
    Program up = world.start({"up", "--slurm", "-c", file});
    REQUIRE_MESSAGE(up.says("waits for its nodes (PartitionDown); Ctrl-C cancels it"), up.err());
    up.signal(SIGINT);
    CHECK(up.wait().code == 0);
    CHECK(slurm.has_no_job(kGoneMs));
    // The same from outside: by scancel, and by k3pipe down.
    Program second = world.start({"up", "--slurm", "-c", file});
    REQUIRE_MESSAGE(second.says("waits for its nodes"), second.err());
    slurm.run("scancel " + slurm.job());
    const Ended cancelled = second.wait();
    CHECK(cancelled.code == 5);
    CHECK(has(cancelled.sentence(), "was cancelled while it waited for its nodes"));
    Program third = world.start({"up", "--slurm", "-c", file});
    REQUIRE_MESSAGE(third.says("waits for its nodes"), third.err());
    CHECK(world.k3pipe({"down", "demo"}).code == 0);
    CHECK(third.wait().code == 0);
    CHECK(is_gone(boxes));
}

TEST_CASE("a job that ends is named, a step that ends is started again" *
          doctest::skip(!slurm_can_be_run())) {
    const Answer& expected = reference();
    World world;
    Boxes boxes(world.path(), 2);
    SlurmCluster slurm(world, boxes, 2);
    const std::string stages = kThree + "[slurm]\nnodes = 2\n";
    auto up = [&](const std::string& extra = "") {
        return std::make_unique<Pipeline>(world, "demo", demo_model_dir(), stages,
                                          kInsecure + extra, std::vector<std::string>{"--slurm"});
    };
    std::unique_ptr<Pipeline> pipeline = up("max_restarts = 20\n");
    // The step, the service in it, and the client here.
    slurm.run("scancel " + slurm.run("squeue --noheader --steps --format=%i | sort | head -n 1"));
    auto restarts = [&pipeline] {
        return pipeline->stage("experts-0").restarts + pipeline->stage("experts-1").restarts +
               pipeline->stage("trunk").restarts;
    };
    auto is_back = [&world, &restarts](std::uint32_t n) {
        const Deadline deadline = Deadline::after_ms(kSoonMs);
        while (!deadline.expired()) {
            const auto record = world.record("demo");
            if (record && record->state == "ready" && restarts() == n) return true;
            std::this_thread::sleep_for(std::chrono::milliseconds(20));
        }
        return false;
    };
    CHECK(is_back(1));
    CHECK(answer_of(*pipeline).logits == expected.logits);
    boxes.run(1, "pkill -9 -o -x k3-experts");
    CHECK(is_back(2));
    ::kill(static_cast<pid_t>(pipeline->stage("trunk").pid), SIGKILL);
    CHECK(is_back(3));
    CHECK(answer_of(*pipeline).logits == expected.logits);

    auto ends_with = [&pipeline, &boxes](const char* sentence) {
        pipeline->given_up();
        const Ended ended = pipeline->program().wait(kSoonMs);
        CHECK(ended.code == 5);
        CHECK(has(ended.sentence(), sentence));
        CHECK(is_gone(boxes));
    };
    slurm.run("scancel " + slurm.job());
    ends_with("was cancelled");
    // (Slurm looks at time limits every 30 s only: tests/unit/launcher/slurm_test.cc has that end.)
    pipeline = up();
    slurm.run("scontrol update nodename=box1 state=down reason=test");
    ends_with("has lost a node");
}

TEST_CASE("what Slurm or the file forbids is refused in one sentence" *
          doctest::skip(!slurm_can_be_run())) {
    World world;
    Boxes boxes(world.path(), 1);
    SlurmCluster slurm(world, boxes, 1);
    struct Refusal {
        std::string stages;
        const char* sentence;
        int code;
    };
    for (const Refusal& refusal : {
             Refusal{"[slurm]\npartition = 'nowhere'\nnodes = 1\n",
                     "demo.toml:5: Slurm makes no job: Invalid partition name specified", 2},
             Refusal{"[trunk]\nhost = 'box7'\n[slurm]\nnodes = 1\n",
                     "trunk has host = 'box7', which is no node of Slurm job", 2},
             Refusal{"[slurm]\nnodes = 3\n", "[slurm] nodes = 3, and there are 2 stages", 2},
             Refusal{"[slurm]\nnodes = 1\nextra = '--no-such-flag'\n", "unrecognized option", 2},
             Refusal{"[experts]\nmodel = '/no/model'\n[slurm]\nnodes = 1\n",
                     "host box0: /no/model has no config.json", 3},
             Refusal{"[trunk]\nwrap = 'gdb'\n[slurm]\nnodes = 1\n",
                     "trunk wants the terminal, and --slurm starts it on a node", 2},
         }) {
        CAPTURE(refusal.sentence);
        const Ended ended = world.k3pipe(asks(write_demo(world, refusal.stages)));
        CHECK(has(ended.err, refusal.sentence));
        CHECK(ended.code == refusal.code);
        CHECK(ended.out.empty());
    }
    // Without keys other boxes could use the stages, and this is known before a job waits.
    Ended ended = world.k3pipe(asks(write_demo(world, "[slurm]\npartition = 'closed'\n", "")));
    CHECK(ended.code == 2);
    CHECK(has(ended.sentence(), "has no keys"));
    const std::string file = write_demo(world, "[slurm]\nnodes = 1\n").string();
    ended = world
                .start_program({"/usr/bin/env", "PATH=/nowhere", built("launcher/k3pipe").string(),
                                "up", "--slurm", "-c", file})
                .wait();
    CHECK(ended.code == 5);
    CHECK(has(ended.sentence(), "--slurm needs scancel, and it is not in PATH"));
    ended = world
                .start_program({"/usr/bin/env", "SLURM_JOB_ID=4711",
                                built("launcher/k3pipe").string(), "up", "--slurm", "-c", file})
                .wait();
    CHECK(ended.code == 5);
    CHECK(has(ended.sentence(), "Invalid job id specified"));
    ended = world.k3pipe({"run", "--attach", "--slurm", "-p", "x"});
    CHECK(ended.code == 2);
    CHECK(is_gone(boxes));
}

TEST_CASE("a node that sees other files is given our programs" *
          doctest::skip(!slurm_can_be_run())) {
    World world;
    Boxes boxes(world.path(), 1);
    SlurmCluster slurm(world, boxes, 1);
    const std::string home = (boxes.disk(0) / "home").string();
    const std::string file = write_demo(world, "[slurm]\nnodes = 1\n").string();
    std::vector<std::string> ask = {"/usr/bin/env", "XDG_CACHE_HOME=" + home,
                                    built("launcher/k3pipe").string()};
    for (const std::string& word : asks(file)) ask.push_back(word);
    // The same files: nothing is copied.
    Ended ended = world.start_program(ask).wait();
    CHECK_MESSAGE(ended.out == " Paris", ended.err);
    CHECK(ended.err.find("copying") == std::string::npos);
    const std::filesystem::path other = world.write("other.toml", "not a program");
    boxes.run(0, "mount --bind " + other.string() + " " + built("launcher/k3pipe").string());
    for (const bool is_first : {true, false}) {
        ended = world.start_program(ask).wait();
        CHECK_MESSAGE(ended.out == " Paris", ended.err);
        CHECK((ended.err.find("copying 3 programs") != std::string::npos) == is_first);
    }
    CHECK(is_gone(boxes));
}
