// A pipeline on an address of this box that others can reach: protected by keys, with the same bits
// as one behind socket files; and nobody without the keys gets anything from it.

#include <arpa/inet.h>
#include <doctest/doctest.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netinet/in.h>
#include <sys/stat.h>
#include <unistd.h>

#include <nlohmann/json.hpp>
#include <optional>
#include <string>

#include "common/base/fd.h"
#include "common/transport/channel.h"
#include "common/transport/curve_keys.h"
#include "tests/support/golden.h"
#include "tests/support/handshake_fuzzer.h"
#include "tests/support/message_fuzzer.h"
#include "tests/support/pipeline.h"

using namespace k3;
using namespace k3::test;
using nlohmann::json;

namespace {

namespace fs = std::filesystem;

constexpr int kFuzzedPerService = 10000;     // by a client that is let in
constexpr int kHandshakesPerService = 2000;  // by one that is not
const std::vector<std::string> kStages = {"tokenizer", "sampler", "experts", "trunk", "gateway"};

/// An IPv4 address of this box that is not loopback; none in a container without a network.
std::optional<std::string> own_address() {
    ifaddrs* all = nullptr;
    if (::getifaddrs(&all) != 0) return std::nullopt;
    std::optional<std::string> found;
    for (const ifaddrs* at = all; at != nullptr && !found; at = at->ifa_next) {
        if (at->ifa_addr == nullptr || at->ifa_addr->sa_family != AF_INET ||
            (at->ifa_flags & IFF_UP) == 0 || (at->ifa_flags & IFF_LOOPBACK) != 0)
            continue;
        char text[INET_ADDRSTRLEN] = {};
        const auto* address = reinterpret_cast<const sockaddr_in*>(at->ifa_addr);
        found = ::inet_ntop(AF_INET, &address->sin_addr, text, sizeof(text));
    }
    ::freeifaddrs(all);
    return found;
}

/// Ports that nobody has at the moment.
std::vector<int> free_ports(const std::string& address, std::size_t n) {
    std::vector<Fd> held;
    std::vector<int> ports;
    for (std::size_t i = 0; i < n; ++i) {
        Fd fd(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
        sockaddr_in name = {};
        name.sin_family = AF_INET;
        ::inet_pton(AF_INET, address.c_str(), &name.sin_addr);
        socklen_t size = sizeof(name);
        REQUIRE(::bind(fd.get(), reinterpret_cast<sockaddr*>(&name), size) == 0);
        REQUIRE(::getsockname(fd.get(), reinterpret_cast<sockaddr*>(&name), &size) == 0);
        ports.push_back(ntohs(name.sin_port));
        held.push_back(std::move(fd));
    }
    return ports;
}

/// Tables in which every stage listens at `address`.
std::string stages_at(const std::string& address) {
    const std::vector<int> ports = free_ports(address, kStages.size());
    std::string text;
    for (std::size_t i = 0; i < kStages.size(); ++i)
        text += "[" + kStages[i] + "]\nlisten = 'tcp://" + address + ":" +
                std::to_string(ports[i]) + "'\n";
    return text;
}

std::string pipeline_file(const std::string& stages, const std::string& keys) {
    return "[pipeline]\nname = 'p'\nmodel = '" + (demo_model_dir()).string() + "'\nkeys = '" +
           keys + "'\n" + stages;
}

/// The two secret keys of a key file, each as it is written there.
std::vector<std::string> secrets_of(const fs::path& file) {
    const std::string text = read_file(file);
    REQUIRE(text.size() == transport::CurveKeys::kFileBytes);
    return {text.substr(14 + 55 + 14, 40), text.substr(14 + 3 * 55 + 14, 40)};
}

void check_tells_no_secret(const std::string& what, const std::string& text,
                           const std::vector<std::string>& secrets) {
    for (const std::string& secret : secrets)
        CHECK_MESSAGE(text.find(secret) == std::string::npos, what);
}

Ended ask(const World& world, const std::string& name, const fs::path& logits) {
    return world.k3pipe({"run", "--attach", name, "-p", "The capital of France is", "--logits-out",
                         logits.string(), "--prompt-logits"});
}

std::shared_ptr<const transport::CurveKeys> load(const fs::path& file) {
    return transport::CurveKeys::load(file.string()).value();
}

}  // namespace

TEST_CASE("over tcp with keys a pipeline computes the same bits, and serves nobody else") {
    const std::optional<std::string> address = own_address();
    if (!address) {
        MESSAGE("NOT RUN: this box has no IPv4 address besides loopback");
        return;
    }
    World world;
    const std::string stages = stages_at(*address);
    const fs::path file = world.write("p.toml", pipeline_file(stages, "p.keys"));
    const Ended made = world.k3pipe({"keys", "-c", file.string()});
    REQUIRE_MESSAGE(made.code == 0, made.err);
    const fs::path key_file = world.path() / "p.keys";
    const std::vector<std::string> secrets = secrets_of(key_file);
    const fs::path other_file = world.path() / "other.keys";
    world.write("other.toml", pipeline_file(stages, "other.keys"));
    REQUIRE(world.k3pipe({"keys", "-c", (world.path() / "other.toml").string()}).code == 0);

    const fs::path demo = demo_model_dir();
    Pipeline near(world, "near", demo, "");
    Pipeline far(world, "far", demo, stages, "keys = 'p.keys'\nlog_level = 'debug'\n");

    SUBCASE("the bits, status, and where the keys are not") {
        const Ended from_near = ask(world, "near", world.path() / "near.npy");
        const Ended from_far = ask(world, "far", world.path() / "far.npy");
        REQUIRE_MESSAGE(from_near.code == 0, from_near.err);
        REQUIRE_MESSAGE(from_far.code == 0, from_far.err);
        CHECK(from_far.out == from_near.out);
        CHECK(read_file(world.path() / "far.npy") == read_file(world.path() / "near.npy"));

        const Ended status = world.k3pipe({"status", "far", "--json"});
        REQUIRE_MESSAGE(status.code == 0, status.err);
        const json runs = json::parse(status.out);
        for (const json& stage : runs[0]["stages"]) CHECK(stage["answers"] == true);
        const Ended plan = world.k3pipe({"plan", "-c", file.string(), "--memory-rate", "1GB"});
        REQUIRE_MESSAGE(plan.code == 0, plan.err);
        CHECK(has(plan.out, "protected by keys"));
        CHECK(has(plan.out, load(key_file)->fingerprint()));

        check_tells_no_secret("keys", made.out + made.err, secrets);
        check_tells_no_secret("plan", plan.out + plan.err, secrets);
        check_tells_no_secret("status", status.out + status.err, secrets);
        std::vector<pid_t> pids = {far.program().pid()};
        for (const std::string& name : kStages)
            pids.push_back(static_cast<pid_t>(far.stage(name).pid));
        for (pid_t pid : pids) {
            const fs::path process = fs::path("/proc") / std::to_string(pid);
            const std::string words = read_file(process / "cmdline");
            CHECK(words.size() > 0);
            if (pid != pids[0]) CHECK(has(words, key_file.string()));
            check_tells_no_secret("cmdline", words, secrets);
            check_tells_no_secret("environ", read_file(process / "environ"), secrets);
        }
        for (const auto& entry : fs::recursive_directory_iterator(world.base()))
            if (entry.is_regular_file())
                check_tells_no_secret(entry.path().string(), read_file(entry.path()), secrets);

        far.given_up();
        const Ended down = world.k3pipe({"down", "far"});
        CHECK_MESSAGE(down.code == 0, down.err);
        const Ended ended = far.program().wait(5000);
        CHECK(ended.code == 0);
        check_tells_no_secret("log", ended.out + ended.err, secrets);
    }
    SUBCASE("callers without keys, or with those of another pipeline") {
        for (const std::string& name : kStages) {
            for (const auto& keys :
                 {std::shared_ptr<const transport::CurveKeys>(), load(other_file)}) {
                transport::Channel::Options options;
                options.endpoint = far.stage(name).endpoint;
                options.peer = name;
                options.keys = keys;
                auto channel = transport::Channel::create(std::move(options)).value();
                const auto pong = channel->ping(Deadline::after_ms(20000));
                REQUIRE_FALSE(pong.has_value());
                CHECK(pong.error().code == ErrorCode::invalid_argument);
            }
        }
        for (const std::string& keys : {std::string(), other_file.string()}) {
            std::vector<std::string> words = {"run", "--gateway", far.gateway(), "-p", "x"};
            if (!keys.empty()) words.insert(words.end(), {"--keys", keys});
            const Ended refused = world.k3pipe(words);
            CHECK(refused.code == 2);
            CHECK(has(refused.sentence(), "gateway (" + far.gateway() + ")"));
            CHECK(has(refused.sentence(), "give"));
        }
        const Ended served = world.k3pipe(
            {"run", "--gateway", far.gateway(), "--keys", key_file.string(), "-p", "x"});
        CHECK_MESSAGE(served.code == 0, served.err);
        CHECK(far.program().says("refused a client at " + *address));
    }
    SUBCASE("garbage, before keys are shown and after") {
        for (const std::string& name : kStages) {
            CAPTURE(name);
            const launcher::StageRecord stage = far.stage(name);
            const HandshakeFuzzReport handshakes =
                fuzz_handshakes(stage.endpoint, kHandshakesPerService);
            CHECK(handshakes.n_messages >= kHandshakesPerService);
            CHECK(handshakes.n_served == 0);
            FuzzOptions options;
            options.endpoint = stage.endpoint;
            options.keys = load(key_file);
            options.n_messages = kFuzzedPerService;
            const FuzzReport report = fuzz_service(options);
            CHECK_MESSAGE(report.alive, report.problem);
            CHECK(report.n_sent == kFuzzedPerService);
            CHECK(report.n_malformed > kFuzzedPerService / 4);
            CHECK(far.stage(name).pid == stage.pid);
            CHECK(far.stage(name).restarts == 0);
        }
        const Ended after = ask(world, "far", world.path() / "after.npy");
        CHECK_MESSAGE(after.code == 0, after.err);
        REQUIRE(ask(world, "near", world.path() / "before.npy").code == 0);
        CHECK(read_file(world.path() / "after.npy") == read_file(world.path() / "before.npy"));
    }
}

TEST_CASE("key files that cannot be used end a start with one sentence") {
    World world;
    const std::string stages = stages_at("127.0.0.1");
    const fs::path file = world.write("p.toml", pipeline_file(stages, "p.keys"));
    const fs::path keys = world.path() / "p.keys";
    const auto check = [&](int code, const std::string& part) {
        const Ended up = world.k3pipe({"up", "-c", file.string()});
        CHECK(up.code == code);
        CHECK(has(up.sentence(), keys.string() + " " + part));
        const Ended service =
            world
                .start_program({built("services/sampler/k3-sampler").string(), "--listen",
                                "tcp://127.0.0.1:*", "--keys", keys.string()})
                .wait(20000);
        CHECK(service.code == code);
        CHECK(has(service.err, keys.string() + " " + part));
    };
    check(2, "does not exist");
    REQUIRE(world.k3pipe({"keys", "-c", file.string()}).code == 0);
    const std::string text = read_file(keys);
    const Ended again = world.k3pipe({"keys", "-c", file.string()});
    CHECK(again.code == 2);
    CHECK(has(again.sentence(), "--replace"));
    CHECK(read_file(keys) == text);
    ::chmod(keys.c_str(), 0644);
    check(2, "is open to other users (mode 0644); run: chmod 600 " + keys.string());
    ::chmod(keys.c_str(), 0600);
    REQUIRE(::truncate(keys.c_str(), 100) == 0);
    check(3, "does not have the 234 bytes");
}

TEST_CASE("a stage that others can reach is refused without keys, and told off with insecure") {
    const std::optional<std::string> address = own_address();
    if (!address) {
        MESSAGE("NOT RUN: this box has no IPv4 address besides loopback");
        return;
    }
    World world;
    const std::string listen =
        "listen = 'tcp://" + *address + ":" + std::to_string(free_ports(*address, 1)[0]) + "'\n";
    const std::string head =
        "[pipeline]\nname = 'open'\nmodel = '" + (demo_model_dir()).string() + "'\n";
    const fs::path file = world.write("open.toml", head + "[sampler]\n" + listen);
    const Ended refused = world.k3pipe({"up", "-c", file.string()});
    CHECK(refused.code == 2);
    CHECK(has(refused.sentence(), "other boxes can reach sampler"));
    CHECK(has(refused.sentence(), "k3pipe keys"));

    Pipeline open(world, "open", demo_model_dir(), "[sampler]\ninsecure = true\n" + listen);
    CHECK(has(open.program().err(), "it has no keys, and insecure is set"));
    CHECK(ask(world, "open", world.path() / "open.npy").code == 0);
}
