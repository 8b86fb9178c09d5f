// What is asked of Slurm, what its programs say, and which stage goes on which node.

#include <doctest/doctest.h>

#include <string>

#include "launcher/slurm_allocation.h"
#include "launcher/slurm_placement.h"
#include "launcher/slurm_remote.h"
#include "launcher/words.h"
#include "tests/support/text.h"

using namespace k3;
using namespace k3::launcher;
using test::contains;

namespace {

PipelineSpec slurm_spec(const std::string& tables) {
    auto spec = parse_pipeline("[pipeline]\nname = 'p'\nmodel = '/m'\n" + tables, "/f/p.toml");
    REQUIRE_MESSAGE(spec.has_value(), spec.error().sentence());
    return *std::move(spec);
}

std::string slurm_refusal(const std::string& tables) {
    auto spec = parse_pipeline("[pipeline]\nname = 'p'\nmodel = '/m'\n" + tables, "/f/p.toml");
    REQUIRE_FALSE(spec.has_value());
    return spec.error().sentence();
}

std::string asked_for(const std::string& tables) {
    const PipelineSpec spec = slurm_spec(tables);
    return shell_line(allocation_words(
        {.spec = spec.slurm, .job_name = "k3pipe-p-1", .n_nodes = 3, .file = spec.file}));
}

std::string slurm_places(const PipelineSpec& spec) {
    std::string text;
    for (const StageSpec& stage : spec.stages)
        text += stage.name + "@" + (stage.host.empty() ? "-" : stage.host) + " ";
    return text;
}

const std::vector<SlurmNode> kNodes = {{"a", "a.cluster"}, {"b", "10.0.0.2"}, {"c", "10.0.0.3"}};

}  // namespace

TEST_CASE("a job has whole nodes unless the file asks for less") {
    CHECK(contains(asked_for(""), "--nodes=3 --ntasks-per-node=1"));
    CHECK(contains(asked_for(""), "--exclusive --mem=0"));
    const std::string less = asked_for(
        "[slurm]\ncpus = 16\nmem = '100G'\npartition = 'big'\naccount = 'a'\nqos = 'q'\n"
        "time = '2:00:00'\nextra = '--constraint=\"x&y\" --reservation=r'\n");
    CHECK(contains(less,
                   "--cpus-per-task=16 --mem=100G --partition=big --account=a --qos=q "
                   "--time=2:00:00"));
    CHECK(contains(less, "x&y"));
    CHECK(contains(less, "--reservation=r"));
    CHECK_FALSE(contains(less, "--exclusive"));
    CHECK_FALSE(contains(asked_for("[slurm]\ncpus = 4\n"), "--mem"));
}

TEST_CASE("a table for Slurm that cannot be meant is refused with its line") {
    CHECK(contains(slurm_refusal("[slurm]\npartitoin = 'x'\n"),
                   "p.toml:5: [slurm] has no key 'partitoin'; did you mean partition?"));
    CHECK(contains(slurm_refusal("[slurm]\nnodes = 0\n"), "nodes"));
    CHECK(contains(slurm_refusal("[slurm]\nextra = 'big'\n"), "'big' is no option of salloc"));
    CHECK(contains(slurm_refusal("[[slurm]]\n"), "slurm must be a table"));
}

TEST_CASE("expert servers and then trunk stages are dealt over the nodes in order") {
    const std::string stages =
        "[[experts]]\n[[experts]]\n[[trunk]]\nlayers = '0-1'\n"
        "[[trunk]]\nlayers = '2-3'\n";
    PipelineSpec spec = slurm_spec(stages);
    CHECK(*nodes_for(spec) == 4);
    REQUIRE(place_on_nodes(&spec, "7", kNodes).has_value());
    CHECK(slurm_places(spec) ==
          "tokenizer@- sampler@- experts-0@a experts-1@b trunk-0@c trunk-1@a gateway@- ");
    REQUIRE(spec.hosts.size() == 3);
    CHECK(spec.hosts[0].address == "a.cluster");
    CHECK(spec.hosts[1].shared_files);
    CHECK(spec.client == "srun");

    // A node by name, an address of the file, and a process that is not ours.
    spec = slurm_spec(
        "[[experts]]\nhost = 'c'\n[[experts]]\n[trunk]\nendpoint = 'tcp://10.0.0.9:1'\n"
        "[hosts.a]\naddress = '10.1.0.1'\n[slurm]\nnodes = 2\n");
    CHECK(*nodes_for(spec) == 2);
    REQUIRE(place_on_nodes(&spec, "7", kNodes).has_value());
    CHECK(contains(slurm_places(spec), "experts-0@c experts-1@a trunk@- "));
    CHECK(spec.hosts[0].address == "10.1.0.1");
    PipelineSpec elsewhere = slurm_spec("[trunk]\nhost = 'z'\n");
    const Status refused = place_on_nodes(&elsewhere, "7", kNodes);
    REQUIRE_FALSE(refused.has_value());
    CHECK(contains(refused.error().sentence(),
                   "trunk has host = 'z', which is no node of Slurm job 7 (a, b, c)"));
}

TEST_CASE("a job with nothing to run, or more nodes than stages, is not asked for") {
    CHECK(contains(nodes_for(slurm_spec("[trunk]\nendpoint = 'tcp://10.0.0.9:1'\n[experts]\n"
                                        "endpoint = 'tcp://10.0.0.9:2'\n"))
                       .error()
                       .sentence(),
                   "--slurm has nothing to start"));
    CHECK(contains(nodes_for(slurm_spec("[slurm]\nnodes = 3\n")).error().sentence(),
                   "p.toml:4: [slurm] nodes = 3, and there are 2 stages to put on them"));
    CHECK(contains(nodes_for(slurm_spec("[experts]\nwrap = 'gdb'\n")).error().sentence(),
                   "experts wants the terminal"));
}

TEST_CASE("how a job ended is told from what Slurm shows of it") {
    auto end = [](const std::string& shown) {
        const auto error = end_of_job("7", shown);
        return error.has_value() ? error->sentence() : "";
    };
    CHECK(end("JobId=7 JobState=RUNNING Reason=None") == "");
    CHECK(end("JobId=7 JobState=SUSPENDED Reason=None") == "");
    CHECK(contains(end("JobState=CANCELLED Reason=None"), "Slurm job 7 was cancelled"));
    CHECK(contains(end("JobState=TIMEOUT Reason=TimeLimit"), "has reached its time limit"));
    CHECK(contains(end("JobState=COMPLETING Reason=TimeLimit"), "has reached its time limit"));
    CHECK(contains(end("JobState=NODE_FAIL Reason=NodeDown"), "has lost a node"));
    CHECK(contains(end("JobState=PREEMPTED Reason=None"), "had to make room"));
    CHECK(contains(end("JobState=OUT_OF_MEMORY Reason=None"), "mem in [slurm]"));
    CHECK(contains(end("JobState=COMPLETING Reason=None"), "has ended, or was cancelled"));
    CHECK(contains(end(""), "has ended, or was cancelled"));
    CHECK(field_of("ReqNodeList=(null) NodeList=a[1-2] X=1\n", "NodeList") == "a[1-2]");
    CHECK(field_of("NodeList=a", "List").empty());
}

TEST_CASE("of what Slurm's programs print the complaint is found") {
    CHECK(slurm_complaint("salloc: error: invalid partition specified: x\nsalloc: error: Job "
                          "submit/allocate failed: Invalid partition name specified\n") ==
          "Invalid partition name specified");
    CHECK(slurm_complaint("salloc: unrecognized option '--x'\nTry \"salloc --help\" for more\n") ==
          "unrecognized option '--x'");
    CHECK(slurm_complaint("").empty());
}

TEST_CASE("a step runs a script of ours, and its client tells a fault from a failure") {
    const auto remote = make_slurm_remote("/bin/srun", "/bin/scontrol", "7");
    const std::string line = shell_line(remote->command("a", "echo x"));
    for (const char* word : {"/bin/srun --jobid=7", "--nodelist=a", "--overlap", "echo x"})
        CHECK(contains(line, word));
    ProgramRun run;
    run.ending = {false, 1};
    run.output = "srun: error: Unable to create step for job 7: Job has expired\n";
    const auto fault = remote->fault("a", run);
    REQUIRE(fault.has_value());
    CHECK(contains(fault->sentence(), "Slurm job 7 cannot run anything on a: Unable to create"));
    run.output = "mkdir: no\nsrun: error: a: task 0: Exited with exit code 1\n";
    CHECK_FALSE(remote->fault("a", run).has_value());
    CHECK(remote->is_own_line("srun: error: a: task 0: Exited with exit code 1"));
    CHECK_FALSE(remote->is_own_line("mkdir: no"));
}
