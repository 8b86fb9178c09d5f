// In which way an expert server is in trouble: told apart and named where somebody looks, in the
// log, in `status` and in the error of a request that cannot be saved.

#include <doctest/doctest.h>
#include <fmt/format.h>
#include <signal.h>
#include <unistd.h>

#include <chrono>
#include <filesystem>
#include <fstream>
#include <memory>
#include <sstream>
#include <string>
#include <thread>

#include "tests/support/golden.h"
#include "tests/support/pipeline.h"
#include "tests/support/socket_proxy.h"

using namespace k3;
using namespace k3::test;

namespace {

constexpr std::uint32_t kTokens = 48;

msg::Submit request() {
    msg::Submit submit = of_ids({387, 486, 344, 495, 13, 7, 8, 9, 10, 11, 12, 300}, kTokens);
    submit.ignore_eos = true;
    submit.want_logits = msg::WantLogits::all;
    return submit;
}

Answer right_answer(const Pipeline& pipeline) {
    Answer answer = pipeline.ask(request());
    REQUIRE_MESSAGE(!answer.error.has_value(), answer.error->sentence());
    REQUIRE(answer.ids.size() == kTokens);
    return answer;
}

/// Processor time of a process so far.
double cpu_seconds(pid_t pid) {
    std::ifstream file(fmt::format("/proc/{}/stat", pid));
    std::string text;
    std::getline(file, text);
    text.erase(0, text.rfind(')') + 2);  // the name may hold blanks
    std::istringstream fields(text);
    std::string field;
    for (int i = 3; i < 14; ++i) fields >> field;
    double user = 0;
    double system = 0;
    fields >> user >> system;
    return (user + system) / static_cast<double>(::sysconf(_SC_CLK_TCK));
}

/// k3-experts started by hand, as on a box that no launcher reaches, behind a proxy.
class FarServer {
  public:
    explicit FarServer(World& world)
        : world_(world), back_("ipc://" + (world.path() / "far").string()) {
        start(golden_dir() / "tiny-k3");
        proxy_ = std::make_unique<SocketProxy>("tcp://127.0.0.1:*", back_);
    }
    void start(const std::filesystem::path& model) {
        program_ = std::make_unique<Program>(world_.start_program(
            {built("services/experts/k3-experts").string(), "--listen", back_, "--name", "far",
             "--model", model.string(), "--threads", "1", "--payload", "inline"}));
        REQUIRE_MESSAGE(program_->says("ready listen="), program_->err());
    }
    void kill() { program_.reset(); }
    pid_t pid() const { return program_->pid(); }
    SocketProxy& proxy() { return *proxy_; }
    std::string table() const {
        return "[[experts]]\nname = 'far'\nendpoint = '" + proxy_->endpoint() + "'\n";
    }

  private:
    World& world_;
    const std::string back_;
    std::unique_ptr<Program> program_;
    std::unique_ptr<SocketProxy> proxy_;
};

}  // namespace

TEST_CASE("a stopped server is called wedged, also when replicas have taken over its calls") {
    World world;
    Pipeline pipeline(world, "hedged", golden_dir() / "tiny-k3",
                      "[trunk]\nthreads = 1\nhedge_quantile = 0.9\n"
                      "[[experts]]\nname = 'one'\nshare = 'all'\nthreads = 1\n"
                      "[[experts]]\nname = 'other'\nshare = 'all'\nthreads = 1\n");
    const Answer expected = right_answer(pipeline);
    const auto pid = static_cast<pid_t>(pipeline.stage("one").pid);
    REQUIRE(pid > 0);
    REQUIRE(::kill(pid, SIGSTOP) == 0);
    const Deadline deadline = Deadline::after_ms(60'000);
    while (pipeline.counter("expert_server_losses", "trunk") == 0 && !deadline.expired()) {
        const Answer answer = right_answer(pipeline);
        CHECK(answer.ids == expected.ids);
        CHECK(answer.logits == expected.logits);
    }
    CHECK(pipeline.program().says("lost one ("));
    CHECK(
        pipeline.program().says("is wedged: its box accepts connections, but the process has "
                                "not answered for"));
    CHECK_FALSE(has(pipeline.program().err(), "queue towards it is full"));
    CHECK(pipeline.counter("expert_server_silences", "trunk") >= 1);
    ::kill(pid, SIGCONT);
    const Deadline back = Deadline::after_ms(30'000);
    while (pipeline.counter("expert_servers_up", "trunk") < 2 && !back.expired())
        std::this_thread::sleep_for(std::chrono::milliseconds(10));
    CHECK(pipeline.counter("expert_servers_up", "trunk") == 2);
    CHECK(right_answer(pipeline).logits == expected.logits);
}

TEST_CASE("what has become of a server that nobody replaces is in the log, status and the error") {
    World world;
    FarServer far(world);
    Pipeline pipeline(world, "demo", golden_dir() / "tiny-k3",
                      "[trunk]\nthreads = 1\nexpert_wait_ms = 2500\n" + far.table());
    const Answer expected = right_answer(pipeline);
    auto ask = [&] {
        return world.start({"run", "--attach", "demo", "-p", "Once upon a time", "--max-tokens",
                            "8", "--ignore-eos"});
    };
    /// Whoever asks meanwhile is told what keeps the answer from coming.
    auto check_named = [&](const std::string& what) {
        Program client = ask();
        CHECK_MESSAGE(pipeline.program().says("trunk waits for far"), pipeline.program().err());
        CHECK_MESSAGE(pipeline.program().says(what), pipeline.program().err());
        const Ended status = world.k3pipe({"status", "demo"});
        CHECK_MESSAGE(has(status.out, what), status.out);
        const Ended ended = client.wait();
        CHECK(ended.code == 5);
        CHECK_MESSAGE(has(ended.sentence(), "has waited 2500 ms"), ended.sentence());
        CHECK_MESSAGE(has(ended.sentence(), "far (" + far.proxy().endpoint() + "), which " + what),
                      ended.sentence());
    };
    auto check_back = [&] {
        CHECK_MESSAGE(pipeline.program().says("trunk has all it needs again"),
                      pipeline.program().err());
        CHECK(right_answer(pipeline).logits == expected.logits);
    };
    SUBCASE("it was killed, and waiting for it costs nothing") {
        far.kill();
        const auto trunk = static_cast<pid_t>(pipeline.stage("trunk").pid);
        Program client = ask();
        REQUIRE(pipeline.program().says("trunk waits for far"));
        const double before = cpu_seconds(trunk);
        const Ended ended = client.wait();
        CHECK(cpu_seconds(trunk) - before < 0.6);  // of 2.5 s
        CHECK(ended.code == 5);
        CHECK_MESSAGE(has(ended.sentence(), "which has closed the connection"), ended.sentence());
        check_named("has closed the connection");
        far.start(golden_dir() / "tiny-k3");
        check_back();
    }
    SUBCASE("it is stopped") {
        ::kill(far.pid(), SIGSTOP);
        check_named("is wedged: its box accepts connections, but the process has not answered");
        ::kill(far.pid(), SIGCONT);
        check_back();
    }
    SUBCASE("it is back with another checkpoint: nobody computes with that") {
        far.kill();
        CHECK(pipeline.program().says("trunk waits for far"));
        pipeline.given_up();
        far.start(demo_model_dir());
        const Ended ended = pipeline.program().wait();
        CHECK(ended.code == 3);
        CHECK_MESSAGE(has(ended.sentence(), "far and "), ended.sentence());
        CHECK_MESSAGE(has(ended.sentence(), "serve different checkpoints (fingerprints"),
                      ended.sentence());
    }
}

TEST_CASE("a server that is slow is named with what it does, and waited for") {
    World world;
    Pipeline pipeline(world, "slow", golden_dir() / "tiny-k3",
                      "[trunk]\nthreads = 1\n"
                      // Not enough to keep anything: every pick is read, at 9,792 bytes each.
                      "[experts]\ncache_bytes = 32768\nread_limit = 8000\nthreads = 1\n");
    Program client = world.start({"run", "--attach", "slow", "-p", "a", "--max-tokens", "1"});
    CHECK_MESSAGE(pipeline.program().says("experts (ipc://"), pipeline.program().err());
    CHECK_MESSAGE(pipeline.program().says(" is slow: "), pipeline.program().err());
    CHECK_MESSAGE(pipeline.program().says("; it waits for its disk"), pipeline.program().err());
    CHECK(pipeline.counter("expert_server_losses", "trunk") == 0);
    client.signal(SIGINT);
    client.wait();
}
