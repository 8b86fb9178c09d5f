// Stages of other boxes: what a pipeline file may say of them, addresses, what is said over ssh.

#include <doctest/doctest.h>
#include <poll.h>
#include <signal.h>
#include <unistd.h>

#include <filesystem>
#include <optional>
#include <string>

#include "common/transport/curve_keys.h"
#include "launcher/host_protocol.h"
#include "launcher/host_setup.h"
#include "launcher/host_starter.h"
#include "launcher/pipeline_file.h"
#include "launcher/ssh_remote.h"
#include "launcher/stage_plan.h"
#include "launcher/words.h"
#include "tests/support/checkpoint_copy.h"
#include "tests/support/golden.h"
#include "tests/support/text.h"

using namespace k3;
using namespace k3::launcher;
using test::contains;

namespace {

Result<PipelineSpec> parsed(const std::string& stages, const std::string& keys = "") {
    return parse_pipeline("[pipeline]\nname = 'p'\nmodel = '" +
                              (test::golden_dir() / "tiny-k3").string() + "'\n" + keys + stages,
                          "/f/p.toml");
}

std::string refusal(const std::string& stages, const std::string& keys = "") {
    auto spec = parsed(stages, keys);
    REQUIRE_FALSE(spec.has_value());
    return spec.error().sentence();
}

const std::string kLocalPrograms =
    "[tokenizer]\nbinary = '/bin/true'\n[sampler]\nbinary = '/bin/true'\n"
    "[gateway]\nbinary = '/bin/true'\n";

/// With addresses as resolve_addresses() finds them.
Result<PipelinePlan> planned(const std::string& stages, const std::string& keys) {
    auto spec = parsed(kLocalPrograms + stages, keys);
    REQUIRE_MESSAGE(spec.has_value(), spec.error().sentence());
    spec->address = "10.0.0.1";
    for (std::size_t i = 0; i < spec->hosts.size(); ++i)
        spec->hosts[i].address = "10.0.0." + std::to_string(2 + i);
    return make_plan(*spec, "/run/p", 0xab);
}

std::string command(const Result<PipelinePlan>& plan, const std::string& name) {
    REQUIRE_MESSAGE(plan.has_value(), plan.error().sentence());
    for (const StagePlan& stage : plan->stages)
        if (stage.name == name) return shell_line(stage.argv);
    FAIL(name);
    return {};
}

/// What has been printed and not been read.
void read_rest(const Process& process, std::string* text) {
    char buffer[256];
    for (ssize_t n = 0; (n = ::read(process.output.get(), buffer, sizeof buffer)) > 0;)
        text->append(buffer, static_cast<std::size_t>(n));
}

}  // namespace

TEST_CASE("a box is what ssh is told, and its table says what is different there") {
    auto spec = parsed(
        "[[experts]]\nhost = 'me@a'\n[[experts]]\nhost = 'b'\n[hosts.b]\nmodel = '/m'\n"
        "address = '10.1.1.1'\nbinary = '/opt/k3pipe'\n",
        "ssh = 'ssh -p 2222'\n");
    REQUIRE_MESSAGE(spec.has_value(), spec.error().sentence());
    CHECK(spec->has_remote());
    CHECK(spec->ssh == std::vector<std::string>{"ssh", "-p", "2222"});
    REQUIRE(spec->hosts.size() == 2);
    CHECK(spec->hosts[0].name == "b");
    CHECK(spec->hosts[0].model == "/m");
    CHECK(spec->hosts[0].binary == "/opt/k3pipe");
    CHECK(spec->hosts[1].name == "me@a");
    CHECK(spec->hosts[1].address.empty());
    CHECK_FALSE(parsed("")->has_remote());
}

TEST_CASE("what cannot be on another box is refused with the line and what to do") {
    CHECK(contains(refusal("[experts]\nhost = 'b'\nlisten = 'ipc:///x.sock'\n"),
                   "can only be reached on b itself"));
    CHECK(contains(refusal("[trunk]\nhost = 'b'\nterminal = true\n"), "wants the terminal"));
    CHECK(contains(refusal("[trunk]\nhost = 'b'\nwrap = 'gdb --args'\n"), "wants the terminal"));
    CHECK(contains(refusal("[experts]\nhost = 'b'\npack = 'x.k3pack'\n"),
                   "/f/p.toml:6: [experts] pack = 'x.k3pack' is a path on b"));
    CHECK(contains(refusal("[experts]\nhost = 'b'\nmodel = 'm'\n"), "not an absolute one"));
    CHECK(contains(refusal("[experts]\nhost = 'b'\nbinary = './x'\n"), "not an absolute one"));
    CHECK(contains(refusal("[experts]\nhost = '-oProxyCommand=x'\n"), "is no box"));
    CHECK(contains(refusal("[experts]\nhost = 'b'\nendpoint = 'tcp://10.0.0.1:1'\n"),
                   "has an endpoint"));
    CHECK(contains(refusal("[hosts.b]\nmodel = 'm'\n"), "is not an absolute path"));
    CHECK(contains(refusal("[hosts.b]\nadress = 'x'\n"), "did you mean"));
    CHECK(contains(refusal("", "ssh = ''\n"), "[pipeline] ssh is empty"));
}

TEST_CASE("who is called across boxes binds tcp, and nobody else does") {
    SUBCASE("experts away") {
        auto plan = planned(
            "[[experts]]\nhost = 'b'\n[[experts]]\nhost = 'c'\n[trunk]\nbinary = '/bin/true'\n"
            "[hosts.b]\nmodel = '/there'\n[hosts.c]\n",
            "insecure = true\n");
        CHECK(contains(command(plan, "trunk"),
                       "--experts tcp://10.0.0.2:5802 --experts tcp://10.0.0.3:5803"));
        CHECK(contains(command(plan, "trunk"), "--listen ipc:///run/p/trunk.sock"));
        CHECK_FALSE(contains(command(plan, "trunk"), "--insecure"));
        CHECK(command(plan, "experts-0").starts_with("k3-experts --listen tcp://10.0.0.2:5802"));
        CHECK(contains(command(plan, "experts-0"), "--insecure"));
        CHECK(contains(command(plan, "experts-0"), "--model /there"));
        CHECK(contains(command(plan, "experts-1"), "tiny-k3"));
        CHECK(plan->on_this_box().stages.size() == 4);
    }
    SUBCASE("a trunk away: its expert server here must be reached, the others need not") {
        auto plan = planned(
            "[experts]\nbinary = '/bin/true'\n[[trunk]]\nhost = 'b'\n[[trunk]]\n"
            "binary = '/bin/true'\n",
            "insecure = true\nport_base = 7000\n");
        CHECK(contains(command(plan, "experts"), "--listen tcp://10.0.0.1:7002"));
        CHECK(contains(command(plan, "trunk-0"), "--listen tcp://10.0.0.2:7003"));
        CHECK(contains(command(plan, "trunk-0"), "--layers 0-"));
        CHECK(contains(command(plan, "trunk-1"), "--listen ipc:///run/p/trunk-1.sock"));
        CHECK(contains(command(plan, "gateway"), "--trunk tcp://10.0.0.2:7003 --trunk ipc://"));
        CHECK(contains(command(plan, "sampler"), "--listen ipc://"));
    }
    SUBCASE("a listen of one's own: a wildcard is bound, the box's address is connected to") {
        auto plan = planned(
            "[experts]\nhost = 'b'\nlisten = 'tcp://0.0.0.0:9'\n[trunk]\n"
            "binary = '/bin/true'\n",
            "insecure = true\n");
        CHECK(contains(command(plan, "experts"), "--listen tcp://0.0.0.0:9"));
        CHECK(contains(command(plan, "trunk"), "--experts tcp://10.0.0.2:9"));
    }
    SUBCASE("refused: no protection, an ipc socket that another box should call") {
        auto open = planned("[experts]\nhost = 'b'\n", "");
        REQUIRE_FALSE(open.has_value());
        CHECK(contains(open.error().sentence(), "pipeline 'p' has no keys"));
        auto ipc = planned("[experts]\nlisten = 'ipc:///x.sock'\n[trunk]\nhost = 'b'\n",
                           "insecure = true\n");
        REQUIRE_FALSE(ipc.has_value());
        CHECK(contains(ipc.error().sentence(), "a stage on another box calls it"));
    }
}

TEST_CASE("a description survives its way, and nothing else is taken for one") {
    StageDescription sent;
    sent.pipeline = "p";
    sent.stage = "experts-1";
    sent.run_id = ~0ULL;
    sent.argv = {"nice", "k3-experts", "--name", "a b\n\"c\""};
    sent.n_wrap = 1;
    sent.env = {{"A", "1"}, {"B", ""}};
    sent.own_sessions = true;
    sent.placement = "/p/a";
    const std::string text = encode_description(sent, {}).value();
    const std::size_t end = text.find('\n');
    const DescriptionSizes sizes = parse_head(text.substr(0, end)).value();
    CHECK(sizes.body == text.size() - end - 1);
    CHECK(sizes.keys == 0);
    constexpr std::size_t kKeys = transport::CurveKeys::kFileBytes;
    CHECK(sizes.placement == 0);
    const std::string with_both =
        encode_description(sent, {.keys = kKeys, .placement = 1 << 20}).value();
    CHECK(parse_head(with_both.substr(0, with_both.find('\n')))->keys == kKeys);
    CHECK(parse_head(with_both.substr(0, with_both.find('\n')))->placement == 1 << 20);
    const StageDescription got = parse_description(text.substr(end + 1)).value();
    CHECK(got.stage == sent.stage);
    CHECK(got.run_id == sent.run_id);
    CHECK(got.argv == sent.argv);
    CHECK(got.n_wrap == 1);
    CHECK(got.env == sent.env);
    CHECK(got.own_sessions);
    CHECK(got.placement == "/p/a");

    for (const char* head :
         {"", "k3pipe-stage", "k3pipe-stage 2", "k3pipe-stage 2 ", "k3pipe-stage 2 7",
          "k3pipe-stage 2 7 0", "k3pipe-stage 2 0 0 0", "k3pipe-stage 2 -5 0 0",
          "k3pipe-stage 2 60001 0 0", "k3pipe-stage 2 7 0 0x", "k3pipe-stage 2 7 99999 0",
          "k3pipe-stage 2 7 0 99999999999", "k3pipe-stage 2 7 0 0 ", "SSH-2.0-OpenSSH"})
        CHECK_FALSE(parse_head(head).has_value());
    auto newer = parse_head("k3pipe-stage 3 100 0 0");
    REQUIRE_FALSE(newer.has_value());
    CHECK(newer.error().code == ErrorCode::incompatible);
    CHECK(contains(newer.error().message, "version 3"));
    for (const char* body : {"", "{}", "[1]", "{\"pipeline\":1}"})
        CHECK_FALSE(parse_description(body).has_value());
    sent.argv.emplace_back(kMaxDescriptionBytes, 'x');
    CHECK_FALSE(encode_description(sent, {}).has_value());
    sent.argv = {"nice"};
    const std::string no_program = encode_description(sent, {}).value();
    CHECK_FALSE(parse_description(no_program.substr(no_program.find('\n') + 1)).has_value());
}

TEST_CASE(
    "a placement larger than a pipe reaches the box whole, and what is said later behind it") {
    ::signal(SIGPIPE, SIG_IGN);
    test::TempDir folder;
    const std::filesystem::path got = folder.path() / "got";
    std::string text;
    while (text.size() < 1000000) text += std::to_string(text.size()) + "\n";
    const HostOptions options = {
        .remote = make_ssh_remote(
            {"/bin/sh", "-c",
             "read head; set -- $head; head -c $3 | grep -o '@[^\"]*'; head -c $5 > " +
                 got.string() +
                 "; while read line; do echo $line; test \"$line\" = pulse || "
                 "exit 7; done"}),
        .host_stage = {{"box", "true"}},
        .pipeline = "p",
        .run_id = 1,
        .placement = "/p/a",
        .placement_text = text};
    const auto starter = make_host_starter(make_local_starter().value(), options);
    Command command;
    command.name = "experts";
    command.argv = {"k3-experts", "--share", "@/p/a#experts"};
    command.host = "box";
    Process process = starter->start(command).value();
    starter->signal(process, 10);
    std::string said;
    const Deadline deadline = Deadline::after_ms(20000);
    std::optional<Ending> ending;
    while (!deadline.expired() && !(ending = starter->reap(process)).has_value()) {
        pollfd fds[] = {{process.exited.get(), POLLIN, 0}, {process.output.get(), POLLIN, 0}};
        ::poll(fds, 2, 1000);
        read_rest(process, &said);
    }
    read_rest(process, &said);
    REQUIRE(ending.has_value());
    CHECK(ending->exit_code() == 7);
    CHECK(contains(said, "@/p/a#experts"));
    CHECK(contains(said, "signal 10"));
    CHECK(test::read_file(got) == text);

    // Without such a share nothing is handed over.
    command.argv = {"k3-experts", "--share", "@/p/b#experts"};
    process = starter->start(command).value();
    starter->signal(process, 10);
    while (!deadline.expired() && !(ending = starter->reap(process)).has_value()) {
        pollfd exited{process.exited.get(), POLLIN, 0};
        ::poll(&exited, 1, 1000);
    }
    CHECK(ending.has_value());
    CHECK(test::read_file(got).empty());
}

TEST_CASE("exit codes and signals are told apart at the other end") {
    for (const Ending& ending : {Ending{false, 0}, Ending{false, 5}, Ending{false, 127},
                                 Ending{true, 9}, Ending{true, 15}, Ending{true, 6}}) {
        const Ending relayed = relayed_ending(relayed_code(ending));
        CHECK(relayed.signalled == ending.signalled);
        CHECK(relayed.number == ending.number);
    }
    CHECK(relayed_code(Ending{false, 200}) == 127);
    CHECK_FALSE(relayed_ending(255).signalled);
}

TEST_CASE("what ssh says becomes a sentence with a way out") {
    CHECK(contains(
        ssh_fault("b", "banner\nssh: connect to host b port 22: No route to host\n").sentence(),
        "host b cannot be reached: ssh: connect to host b port 22: No route to host"));
    CHECK(contains(ssh_fault("b", "me@b: Permission denied (publickey).\r\n").sentence(),
                   "ssh-copy-id b"));
    CHECK(contains(
        ssh_fault("b", "No ED25519 host key is known\nHost key verification failed.\n").sentence(),
        "the host key of b is not known here"));
    CHECK(contains(ssh_fault("b",
                             "@ WARNING: REMOTE HOST IDENTIFICATION HAS CHANGED! @\n"
                             "Host key verification failed.\n")
                       .sentence(),
                   "ssh-keygen -R b"));
    CHECK(hostname_of("user me\nhostname 10.0.0.9\nport 22\n") == "10.0.0.9");
    CHECK(hostname_of("user me\n").empty());
}

TEST_CASE("a report is read between the lines of others") {
    const HostReport report = parse_report(
        "Welcome!\nk3pipe: machine x86_64\nk3pipe: no-model /a b\nk3pipe: program /c d\n"
        "k3pipe: library \tlibzmq.so.5 => not found\nk3pipe: library libfmt.so.9 => not found\n");
    CHECK(report.machine == "x86_64");
    CHECK(report.program == "/c d");
    CHECK(report.no_models == std::vector<std::string>{"/a b"});
    REQUIRE(report.libraries.size() == 2);
    CHECK(report.libraries[0] == "libzmq.so.5 => not found");
    CHECK(parse_report("k3pipe: machine x86_64\n").program.empty());
    CHECK(parse_report("").machine.empty());
}
