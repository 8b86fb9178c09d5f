// `k3pipe render` and `k3pipe probe`: what is rendered is valid, and what it says to start works
// together and gives the bytes of `k3pipe run`.
//
// Nobody here is systemd or a cluster. So the tests read units and manifests as these do, start the
// commands, and play the part of the manager: its sockets, folders, addresses and probes.

#include <doctest/doctest.h>
#include <poll.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <array>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <sstream>
#include <string>
#include <vector>

#include "common/base/deadline.h"
#include "common/base/fd.h"
#include "tests/support/checkpoint_copy.h"
#include "tests/support/golden.h"
#include "tests/support/pipeline.h"

using namespace k3;
using namespace k3::test;
namespace fs = std::filesystem;
using nlohmann::json;

namespace {

const char* const kThreeServers =
    "[experts]\ncount = 3\ncache_bytes = '256KiB'\n[trunk]\nsession_bytes = '8MiB'\nthreads = 1\n";

std::string write_config(const World& world, const std::string& stages,
                         const std::string& extra = "") {
    return world
        .write("p.toml", "[pipeline]\nmodel = '" + (golden_dir() / "tiny-k3").string() + "'\n" +
                             extra + stages)
        .string();
}

/// What a request through `gateway` brings: the logits of every token.
std::string logits_of(const World& world, std::vector<std::string> where) {
    const std::string file = (world.path() / "logits.npy").string();
    std::vector<std::string> arguments = {"run", "--ids",        "1,2,3,4,5",    "--max-tokens",
                                          "6",   "--ignore-eos", "--logits-out", file};
    arguments.insert(arguments.end(), where.begin(), where.end());
    const Ended ended = world.k3pipe(arguments, 120000);
    CHECK_MESSAGE(ended.code == 0, ended.err);
    std::string bytes = fs::exists(file) ? read_file(file) : std::string();
    fs::remove(file);
    return bytes;
}

bool lacks(const std::string& text, const std::string& part) {
    return text.find(part) == std::string::npos;
}

std::string replaced(std::string text, const std::string& from, const std::string& to) {
    for (std::size_t at = 0; (at = text.find(from, at)) != std::string::npos; at += to.size())
        text.replace(at, from.size(), to);
    return text;
}

/// A unit's directives, in order; lines that go on are joined.
struct Unit {
    std::string name;
    std::multimap<std::string, std::string> keys;

    std::vector<std::string> all(const std::string& key) const {
        std::vector<std::string> values;
        const auto [first, last] = keys.equal_range(key);
        for (auto it = first; it != last; ++it) values.push_back(it->second);
        return values;
    }
    std::string one(const std::string& key) const {
        const auto values = all(key);
        REQUIRE_MESSAGE(values.size() == 1, (name + ": " + key));
        return values.front();
    }
};

Unit read_unit(const fs::path& path) {
    Unit unit{path.filename().string(), {}};
    std::istringstream stream(read_file(path));
    std::string joined;
    for (std::string line; std::getline(stream, line);) {
        if (line.starts_with('#')) continue;
        joined += line;
        if (joined.ends_with('\\')) {
            joined.back() = ' ';
            continue;
        }
        if (const std::size_t at = joined.find('='); at != std::string::npos)
            unit.keys.emplace(joined.substr(0, at), joined.substr(at + 1));
        joined.clear();
    }
    return unit;
}

/// Words as systemd.service(5) splits them, with specifiers and "$$" of commands undone.
std::vector<std::string> words_of(const std::string& line, const std::string& credentials,
                                  bool is_command) {
    std::vector<std::string> words;
    std::string word;
    bool in_word = false;
    bool in_quotes = false;
    for (std::size_t i = 0; i < line.size(); ++i) {
        const char c = line[i];
        const char next = i + 1 < line.size() ? line[i + 1] : '\0';
        if (c == '"') {
            in_quotes = !in_quotes;
            in_word = true;
        } else if (c == ' ' && !in_quotes) {
            if (in_word) words.push_back(word);
            word.clear();
            in_word = false;
        } else {
            in_word = true;
            if (c == '\\' && next == 'x') {
                word += static_cast<char>(std::stoi(line.substr(i + 2, 2), nullptr, 16));
                i += 3;
            } else if (c == '\\') {
                word += line[++i];
            } else if (c == '%' && next == 'd') {
                word += credentials;
                ++i;
            } else if ((c == '%' || (c == '$' && is_command)) && next == c) {
                word += line[i++];
            } else {
                REQUIRE_MESSAGE((c != '%' && (c != '$' || !is_command)), line);
                word += c;
            }
        }
    }
    REQUIRE_FALSE(in_quotes);
    if (in_word) words.push_back(word);
    return words;
}

/// The socket of a service manager.
class NotifySocket {
  public:
    explicit NotifySocket(const fs::path& path)
        : path_(path), fd_(::socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0)) {
        sockaddr_un address = {};
        address.sun_family = AF_UNIX;
        std::strncpy(address.sun_path, path.c_str(), sizeof address.sun_path - 1);
        REQUIRE(::bind(fd_.get(), reinterpret_cast<sockaddr*>(&address), sizeof address) == 0);
    }
    ~NotifySocket() { fs::remove(path_); }
    NotifySocket(const NotifySocket&) = delete;
    NotifySocket& operator=(const NotifySocket&) = delete;

    const fs::path& path() const { return path_; }

    /// True once a message with this line has come.
    bool hears(const std::string& line, std::int64_t ms = 60000) {
        const Deadline deadline = Deadline::after_ms(ms);
        while (!deadline.expired()) {
            pollfd wait{fd_.get(), POLLIN, 0};
            if (::poll(&wait, 1, static_cast<int>(deadline.remaining_ms())) != 1) continue;
            std::array<char, 4096> buffer{};
            const ssize_t got = ::recv(fd_.get(), buffer.data(), buffer.size(), 0);
            if (got > 0 && !lacks("\n" + std::string(buffer.data(), static_cast<std::size_t>(got)),
                                  "\n" + line + "\n"))
                return true;
        }
        return false;
    }

  private:
    fs::path path_;
    Fd fd_;
};

/// A unit as systemd would start it.
struct Started {
    Unit unit;
    std::unique_ptr<NotifySocket> manager;
    std::unique_ptr<Program> program;
};

Started start_unit(const World& world, const Unit& unit) {
    Started started{unit, nullptr, nullptr};
    started.manager =
        std::make_unique<NotifySocket>(world.path() / ("notify-" + unit.name.substr(7)));
    const fs::path runtime = world.path() / unit.one("RuntimeDirectory");
    fs::create_directory(runtime);
    fs::permissions(runtime, fs::perms::owner_all);
    const fs::path credentials = world.path() / "credentials";
    for (const std::string& credential : unit.all("LoadCredential")) {
        const std::size_t colon = credential.find(':');
        fs::create_directory(credentials);
        const fs::path copy = credentials / credential.substr(0, colon);
        fs::remove(copy);
        fs::copy_file(replaced(credential.substr(colon + 1), "%%", "%"), copy);
        fs::permissions(copy, fs::perms::owner_read);
    }
    std::vector<std::string> argv = {"/usr/bin/env",
                                     "NOTIFY_SOCKET=" + started.manager->path().string(),
                                     "WATCHDOG_USEC=1000000"};
    for (const std::string& variable : unit.all("Environment"))
        for (const std::string& word : words_of(variable, "", false)) argv.push_back(word);
    for (const std::string& word : words_of(unit.one("ExecStart"), credentials.string(), true))
        argv.push_back(word);
    started.program = std::make_unique<Program>(world.start_program(argv));
    return started;
}

/// All services of a folder, each after those that its After names are ready.
std::map<std::string, Started> start_units(const World& world, const fs::path& folder) {
    std::map<std::string, Unit> waiting;
    for (const auto& entry : fs::directory_iterator(folder))
        if (entry.path().extension() == ".service")
            waiting.emplace(entry.path().filename().string(), read_unit(entry.path()));
    REQUIRE(waiting.size() > 4);
    std::map<std::string, Started> started;
    while (!waiting.empty()) {
        const std::size_t before = waiting.size();
        for (auto it = waiting.begin(); it != waiting.end();) {
            bool may_start = true;
            for (const std::string& after : it->second.all("After"))
                for (const std::string& word : words_of(after, "", false))
                    may_start = may_start && !waiting.contains(word);
            if (!may_start) {
                ++it;
                continue;
            }
            Started one = start_unit(world, it->second);
            REQUIRE_MESSAGE(one.manager->hears("READY=1"), (it->first + "\n" + one.program->err()));
            started.emplace(it->first, std::move(one));
            it = waiting.erase(it);
        }
        REQUIRE_MESSAGE(waiting.size() < before, "units wait for each other");
    }
    return started;
}

void stop_units(std::map<std::string, Started>& units) {
    for (const char* kind : {"gateway", "trunk", "experts", "sampler", "tokenizer"})
        for (auto& [name, one] : units) {
            if (lacks(name, kind)) continue;
            one.program->signal(SIGTERM);
            CHECK(one.manager->hears("STOPPING=1"));
            CHECK_MESSAGE(one.program->wait().code == 0, name);
        }
}

/// Says once what is not run for want of it.
bool is_there(const char* what, const char* command) {
    const bool works = std::system((std::string(command) + " > /dev/null 2>&1").c_str()) == 0;
    if (!works) std::printf("NOT RUN: %s is not installed\n", what);
    return works;
}

bool has_systemd() {
    static const bool works = is_there("systemd", "command -v systemd-analyze");
    return works;
}
bool has_kubectl() {
    static const bool works = is_there("kubectl", "command -v kubectl");
    return works;
}
bool has_yaml() {
    static const bool works = is_there("python3-yaml", "python3 -c 'import yaml'");
    return works;
}

std::string script() {
    return std::string(std::getenv("K3_SOURCE_ROOT")) + "/tests/pipeline/manifests.py";
}

/// A folder as that of an installed k3pipe.
fs::path programs_in(const World& world) {
    const fs::path folder = world.path() / "programs";
    fs::create_directory(folder);
    fs::create_symlink(built("launcher/k3pipe"), folder / "k3pipe");
    for (const char* kind : {"tokenizer", "sampler", "experts", "trunk", "gateway"})
        fs::create_symlink(built(std::string("services/") + kind + "/k3-" + kind),
                           folder / (std::string("k3-") + kind));
    return folder;
}

/// A pod of a manifest, with an address of its own on the loopback.
struct Pod {
    std::string dns;
    std::string index;
    std::string address;
    json spec;
};

/// A word of a container as it reaches the program in this pod.
std::string word_in(const Pod& pod, const std::vector<Pod>& pods, const fs::path& secrets,
                    std::string word) {
    word = replaced(std::move(word), "$(K3PIPE_POD_INDEX)", pod.index);
    word = replaced(std::move(word), "tcp://0.0.0.0:", "tcp://" + pod.address + ":");
    word = replaced(std::move(word), "tcp://127.0.0.1:", "tcp://" + pod.address + ":");
    for (const Pod& other : pods)
        word =
            replaced(std::move(word), "tcp://" + other.dns + ":", "tcp://" + other.address + ":");
    word = replaced(std::move(word), "/run/k3pipe-keys/keys", (secrets / "keys").string());
    word = replaced(std::move(word), "/etc/k3pipe/", (secrets / "").string());
    return replaced(std::move(word), "/var/lib/k3pipe/sessions", (secrets / "sessions").string());
}

std::vector<std::string> words_in(const Pod& pod, const std::vector<Pod>& pods,
                                  const fs::path& secrets, const json& words) {
    std::vector<std::string> argv;
    for (const json& word : words) argv.push_back(word_in(pod, pods, secrets, word));
    return argv;
}

/// The pods of all sets. Addresses are this process's own: 127.x.y.z belongs to the loopback.
std::vector<Pod> pods_of(const json& objects) {
    std::vector<Pod> pods;
    const unsigned id = static_cast<unsigned>(::getpid());
    for (const json& object : objects) {
        if (object["kind"] != "StatefulSet") continue;
        const std::string name = object["metadata"]["name"];
        const int start = object["spec"].contains("ordinals")
                              ? object["spec"]["ordinals"]["start"].get<int>()
                              : 0;
        for (int i = start; i < start + object["spec"]["replicas"].get<int>(); ++i)
            pods.push_back({name + "-" + std::to_string(i) + "." + name, std::to_string(i),
                            "127." + std::to_string(1 + (id >> 8U) % 254) + "." +
                                std::to_string(id & 255U) + "." + std::to_string(1 + pods.size()),
                            object["spec"]["template"]["spec"]});
    }
    return pods;
}

json read_manifests(const World& world, const std::string& file) {
    const Ended ended =
        world.start_program({"/usr/bin/env", "python3", script(), "show", file}).wait();
    REQUIRE_MESSAGE(ended.code == 0, (ended.out + ended.err));
    return json::parse(ended.out);
}

}  // namespace

TEST_CASE("what systemd would start gives the bytes of k3pipe run, and says how it is") {
    World world;
    const std::string config = write_config(world, kThreeServers);
    const std::string expected = logits_of(world, {"-c", config});
    // A server on tcp has keys, and gets them as a credential; a value that systemd could misread.
    const std::string keys = (world.path() / "the 100% keys").string();
    const std::string with_keys =
        write_config(world,
                     std::string(kThreeServers) + "[sampler]\nlisten = 'tcp://127." +
                         std::to_string(1 + ::getpid() % 254) +
                         ".77.1:5899'\nenv = { K3_ODD = 'a \"b\" 5% $HOME \\ ; c' }\n",
                     "name = 'p'\nkeys = '" + keys + "'\n");
    REQUIRE(world.k3pipe({"keys", "-c", with_keys}).code == 0);
    const fs::path out = world.path() / "units";
    const Ended rendered =
        world.k3pipe({"render", "systemd", "--user", "-c", with_keys, "--out", out.string()});
    REQUIRE_MESSAGE(rendered.code == 0, rendered.err);
    // Never the keys themselves.
    const std::string secret = read_file(keys);
    const std::string secret_line = secret.substr(secret.find("server-secret ") + 14, 40);
    for (const auto& entry : fs::directory_iterator(out))
        CHECK(lacks(read_file(entry.path()), secret_line));
    // They come out of percent signs as the file is called.
    CHECK(has(read_unit(out / "k3pipe-p-sampler.service").one("LoadCredential"), "100%% keys"));

    auto units = start_units(world, out);
    const Unit target = read_unit(out / "k3pipe-p.target");
    for (const auto& [name, one] : units) CHECK(has(target.one("Wants"), name));
    std::ifstream environment("/proc/" +
                              std::to_string(units.at("k3pipe-p-sampler.service").program->pid()) +
                              "/environ");
    std::string variables{std::istreambuf_iterator<char>(environment), {}};
    CHECK(has(variables, "K3_ODD=a \"b\" 5% $HOME \\ ; c"));

    const std::string gateway = "ipc://" + (world.path() / "k3pipe-p" / "gateway.sock").string();
    CHECK(logits_of(world, {"--gateway", gateway}) == expected);
    CHECK(expected.size() > 1000);
    CHECK(units.at("k3pipe-p-trunk.service").manager->hears("WATCHDOG=1"));

    // Killed and started again, as Restart= does: it takes its place, and leaves no segment.
    Started& server = units.at("k3pipe-p-experts-1.service");
    const std::string of_killed = "-" + std::to_string(server.program->pid());
    server.program->signal(SIGKILL);
    CHECK(server.program->wait().code == 128 + SIGKILL);
    server.manager.reset();  // its place is taken by the next one's
    server = start_unit(world, Unit(server.unit));
    REQUIRE(server.manager->hears("READY=1"));
    for (const auto& entry : fs::directory_iterator("/dev/shm"))
        CHECK_FALSE(entry.path().filename().string().ends_with(of_killed));
    CHECK(logits_of(world, {"--gateway", gateway}) == expected);
    stop_units(units);
}

TEST_CASE("units are what systemd accepts, with limits, cores and an order" *
          doctest::skip(!has_systemd())) {
    World world;
    const std::string config = write_config(
        world,
        "[[experts]]\ncache_bytes = '256KiB'\ncores = '0'\ndisk_cache = 'a b/cache'\n"
        "disk_cache_bytes = '1MiB'\nrestart = 'never'\n"
        "[[experts]]\nenv = { ODD = 'x \"y\" 5% \\ z' }\n[sampler]\nwrap = 'nice -n 5'\n",
        "max_restarts = 3\nrestart_window_s = 30\nstart_timeout_s = 600\nname = 'p'\n");
    const fs::path out = world.path() / "units";
    const Ended rendered = world.k3pipe(
        {"render", "systemd", "-c", config, "--account", "daemon", "--out", out.string()});
    REQUIRE_MESSAGE(rendered.code == 0, rendered.err);
    std::vector<std::string> argv = {"/usr/bin/env", "systemd-analyze", "verify", "--man=no"};
    for (const auto& entry : fs::directory_iterator(out)) argv.push_back(entry.path().string());
    const Ended verified = world.start_program(argv).wait();
    CHECK_MESSAGE(verified.code == 0, verified.err);
    // It warns of what it does not know; other units of this machine are its own business.
    for (const char* part : {"k3pipe-p", "Unknown", "Failed to parse"})
        CHECK_MESSAGE(lacks(verified.err, part), verified.err);

    const Unit first = read_unit(out / "k3pipe-p-experts-0.service");
    CHECK(first.one("Restart") == "no");
    CHECK(first.one("CPUAffinity") == "0");
    CHECK(first.one("User") == "daemon");
    CHECK(first.one("TimeoutStartSec") == "600");
    CHECK(first.one("ReadWritePaths") == "\"-" + (world.path() / "a b").string() + "\"");
    // 256 MiB and an eighth above the plan of some megabytes.
    const std::uint64_t limit = std::stoull(first.one("MemoryMax"));
    CHECK(limit > 270'000'000);
    CHECK(limit < 400'000'000);
    const Unit second = read_unit(out / "k3pipe-p-experts-1.service");
    CHECK(second.one("Restart") == "on-failure");
    CHECK(second.one("RestartPreventExitStatus") == "2 3");
    CHECK(second.one("StartLimitBurst") == "4");
    CHECK(second.all("MemoryMax").empty());  // no cache_bytes: nobody knows how much it takes
    CHECK(has(read_file(out / "k3pipe-p-experts-1.service"), "# No MemoryMax: cache_bytes is not"));
    const Unit wrapped = read_unit(out / "k3pipe-p-sampler.service");
    CHECK(has(wrapped.one("ExecStart"), "/nice -n 5 "));
    CHECK(wrapped.one("NotifyAccess") == "all");
    CHECK(wrapped.all("WatchdogSec").empty());
    // Command lines are those of plan.
    const Ended plan = world.k3pipe({"plan", "-c", config});
    for (const char* flags : {"--share 1/2", "--cache-bytes 256KiB --cores 0 --disk-cache"})
        CHECK_MESSAGE(has(plan.out, flags), plan.out);
    CHECK(has(second.one("ExecStart"), "--share 1/2"));
}

TEST_CASE("what a cluster would start gives the bytes of k3pipe run, and its probes work" *
          doctest::skip(!has_yaml())) {
    World world;
    const std::string plain = write_config(world, kThreeServers);
    const std::string expected = logits_of(world, {"-c", plain});
    const fs::path secrets = world.path() / "mounted";
    fs::create_directory(secrets);
    const std::string placement = (secrets / "pipeline.placement").string();
    REQUIRE(world.k3pipe({"placement", "-c", plain, "--replicas", "2", "--out", placement}).code ==
            0);
    const std::string config = write_config(
        world,
        std::string("[experts]\ncount = 3\ncache_bytes = '256KiB'\n[[trunk]]\nthreads = 1\n"
                    "[[trunk]]\nthreads = 1\nsession_bytes = '8MiB'\n"),
        "name = 'My_pipe'\nplacement = '" + placement + "'\nkeys = 'mounted/keys'\n");
    REQUIRE(world.k3pipe({"keys", "-c", config}).code == 0);
    const Ended rendered = world.k3pipe({"render", "kubernetes", "-c", config, "--image", "k3:1",
                                         "--programs", programs_in(world).string()});
    REQUIRE_MESSAGE(rendered.code == 0, rendered.err);
    CHECK(has(rendered.err, "kubectl create secret generic k3pipe-my-pipe-keys --from-file=keys="));
    const std::string secret = read_file(secrets / "keys");
    CHECK(lacks(rendered.out, secret.substr(secret.find("server-secret ") + 14, 40)));
    const json objects = read_manifests(world, world.write("all.yaml", rendered.out).string());
    CHECK(objects[0]["data"]["pipeline.placement"] == read_file(placement));
    CHECK(objects[0]["data"]["pipeline.toml"] == read_file(config));

    const std::vector<Pod> pods = pods_of(objects);
    REQUIRE(pods.size() == 5);  // three experts, the first trunk, all others
    CHECK(pods.back().spec["containers"].size() == 4);
    std::vector<std::unique_ptr<Program>> programs;
    std::string gateway;
    for (const Pod& pod : pods)
        for (const json& container : pod.spec["containers"]) {
            const json& before = container["startupProbe"]["exec"]["command"];
            const Ended absent = world.start_program(words_in(pod, pods, secrets, before)).wait();
            CHECK(absent.code == 5);
            programs.push_back(std::make_unique<Program>(
                world.start_program(words_in(pod, pods, secrets, container["command"]))));
            if (container["name"] == "gateway") gateway = "tcp://" + pod.address + ":5800";
        }
    for (const char* probe : {"startupProbe", "readinessProbe", "livenessProbe"})
        for (const Pod& pod : pods)
            for (const json& container : pod.spec["containers"]) {
                const Deadline deadline = Deadline::after_ms(60000);
                Ended asked;
                do
                    asked = world
                                .start_program(words_in(pod, pods, secrets,
                                                        container[probe]["exec"]["command"]))
                                .wait();
                while (asked.code == 5 && !deadline.expired());
                CHECK_MESSAGE(asked.code == 0, (std::string(probe) + asked.err));
            }
    CHECK(logits_of(world, {"--gateway", gateway, "--keys", (secrets / "keys").string()}) ==
          expected);
    // Without the keys of the pipeline nobody is told anything.
    CHECK(world.k3pipe({"probe", gateway, "--wait-ms", "500"}).code != 0);
    for (auto it = programs.rbegin(); it != programs.rend(); ++it) (*it)->signal(SIGTERM);
    for (auto& program : programs) CHECK_MESSAGE(program->wait().code == 0, program->err());
}

TEST_CASE("manifests have no field that kubectl does not know, and limits from the plan" *
          doctest::skip(!has_yaml() || !has_kubectl())) {
    World world;
    const fs::path out = world.path() / "manifests";
    // Servers that are not alike have sets of their own, which go on counting.
    const std::string config = write_config(
        world,
        "[[experts]]\ncache_bytes = '256KiB'\n[[experts]]\ncache_bytes = '512KiB'\ncores = '0-2'\n"
        "[[experts]]\ncache_bytes = '512KiB'\ncores = '0-2'\n[[experts]]\ndisk_cache = 'cache'\n"
        "disk_cache_bytes = '1MiB'\n[trunk]\nsession_bytes = '8MiB'\nenv = { A = 'no $(HOME)' }\n",
        "insecure = true\nname = 'p'\n");
    const Ended rendered = world.k3pipe({"render", "kubernetes", "-c", config, "--image", "k3:1",
                                         "--out", out.string(), "--model-claim", "weights"});
    REQUIRE_MESSAGE(rendered.code == 0, rendered.err);
    std::size_t n_sets = 0;
    for (const auto& entry : fs::directory_iterator(out)) {
        const std::string file = entry.path().string();
        const bool is_set = file.ends_with("statefulset.yaml");
        n_sets += is_set ? 1 : 0;
        if (file.ends_with("configmap.yaml")) continue;
        const std::string change = is_set ? "env" : "selector";
        const Ended known =
            world
                .start_program({"/bin/sh", "-c",
                                "kubectl set " + change + " --local -o json a=b -f '" + file +
                                    "' | python3 '" + script() + "' known '" + file + "'"})
                .wait();
        CHECK_MESSAGE(known.code == 0, (file + "\n" + known.out + known.err));
    }
    CHECK(n_sets == 4);
    const json middle =
        read_manifests(world, (out / "k3pipe-p-experts-from-1-statefulset.yaml").string())[0];
    CHECK(middle["spec"]["replicas"] == 2);
    CHECK(middle["spec"]["ordinals"]["start"] == 1);
    const json& container = middle["spec"]["template"]["spec"]["containers"][0];
    CHECK(container["resources"]["requests"]["cpu"] == "3");
    CHECK(has(container["command"].dump(), "\"$(K3PIPE_POD_INDEX)/4\""));
    CHECK(has(container["command"].dump(), "--insecure"));
    CHECK(lacks(container.dump(), "--keys"));
    const int limit = std::stoi(container["resources"]["limits"]["memory"].get<std::string>());
    CHECK(limit > 256);
    CHECK(limit < 400);
    const json last =
        read_manifests(world, (out / "k3pipe-p-experts-3-statefulset.yaml").string())[0];
    CHECK_FALSE(last["spec"]["template"]["spec"]["containers"][0]["resources"].contains("limits"));
    const std::string front = read_file(out / "k3pipe-p-gateway-statefulset.yaml");
    CHECK(has(front, "claimName: \"weights\""));
    CHECK(has(front, "value: \"no $$(HOME)\""));
}

TEST_CASE("what cannot be rendered is one sentence, and nothing is overwritten") {
    World world;
    const std::string config = write_config(world, "");
    const auto refusal = [&](std::vector<std::string> arguments, int code = 2) {
        const Ended ended = world.k3pipe(std::move(arguments));
        CHECK_MESSAGE(ended.code == code, ended.err);
        CHECK(ended.out.empty());
        return ended.sentence();
    };
    CHECK(has(refusal({"render", "docker", "-c", config}), "'docker' is not one of systemd, kube"));
    CHECK(has(refusal({"render", "kubernetes", "-c", config}), "--image says which"));
    CHECK(has(refusal({"render", "systemd", "-c", config, "--image", "x"}),
              "--image is for render kubernetes"));
    CHECK(has(refusal({"render", "kubernetes", "-c", config, "--user", "--image", "x"}),
              "--user is for render systemd"));
    CHECK(has(refusal({"render", "systemd", "-c", config, "--programs", "bin"}),
              "not an absolute path"));
    CHECK(
        has(refusal({"render", "systemd", "-c", config, "--account", "a b"}), "no name of a user"));
    CHECK(
        has(refusal({"render", "systemd", "-c", config, "--name", "a b"}), "not a legal pipeline"));
    const auto in_cluster = [&](const std::string& stages, const std::string& extra = "") {
        return refusal(
            {"render", "kubernetes", "-c", write_config(world, stages, extra), "--image", "x"});
    };
    CHECK(has(in_cluster("[experts]\nhost = 'other'\n"), "Kubernetes chooses the nodes"));
    CHECK(has(in_cluster("[sampler]\nlisten = 'ipc:///tmp/s'\n"), "listens at ipc:///tmp/s"));
    CHECK(has(in_cluster("[sampler]\nendpoint = 'ipc:///tmp/s'\n"), "which a pod cannot reach"));
    CHECK(has(in_cluster("[sampler]\nendpoint = 'tcp://127.0.0.1:1'\n"), "a pod cannot reach"));
    CHECK(has(in_cluster("[trunk]\nwrap = 'gdb --args'\n"), "wants a terminal"));
    CHECK(has(in_cluster("[experts]\nname = 'a-name-that-goes-on-for-quite-a-while'\n",
                         "name = 'another-one-that-does-so'\n"),
              "the name of a stateful set may have 52"));
    CHECK(has(refusal({"render", "systemd", "-c",
                       write_config(world, "[trunk]\nwrap = 'env'\nterminal = true\n")}),
              "wants a terminal, and a unit has none"));
    const std::string remote = write_config(
        world, "[experts]\nhost = '127.0.0.1'\n[hosts.\"127.0.0.1\"]\naddress = '127.0.0.1'\n",
        "insecure = true\nssh = 'true'\n");
    CHECK(has(refusal({"render", "systemd", "-c", remote}), "lie on 127.0.0.1"));

    // A file of somebody else in the way.
    const std::string again = write_config(world, "");
    const fs::path out = world.path() / "units";
    fs::create_directory(out);
    write_file(out / "k3pipe-p-trunk.service", "[Unit]\n");
    CHECK(has(refusal({"render", "systemd", "-c", again, "--name", "p", "--out", out.string()}),
              "k3pipe render"));
    CHECK(read_file(out / "k3pipe-p-trunk.service") == "[Unit]\n");
    CHECK_FALSE(fs::exists(out / "k3pipe-p.target"));
    fs::remove(out / "k3pipe-p-trunk.service");
    const auto rendered = [&](const std::string& file) {
        const Ended ended =
            world.k3pipe({"render", "systemd", "-c", file, "--name", "p", "--out", out.string()});
        CHECK_MESSAGE(ended.code == 0, ended.err);
        return ended.err;
    };
    rendered(write_config(world, "[experts]\ncount = 2\n"));
    // One of its own is replaced, and what this one no longer has is named.
    CHECK(has(rendered(write_config(world, "")), "k3pipe-p-experts-1.service is of an earlier"));
}

TEST_CASE("probe tells a service that loads from one that is ready and from nobody") {
    World world;
    const std::string socket = "ipc://" + (world.path() / "g.sock").string();
    const std::string nobody = "ipc://" + (world.path() / "nobody.sock").string();
    CHECK(world.k3pipe({"probe", socket, "--wait-ms", "200"}).code == 5);
    CHECK(world.k3pipe({"probe", "here"}).code == 2);
    CHECK(world.k3pipe({"probe"}).code == 2);
    CHECK(world.k3pipe({"probe", socket, "--keys", "/no/such"}).code == 2);
    // A gateway without its stages is up and waits for them.
    Program gateway =
        world.start_program({built("services/gateway/k3-gateway").string(), "--listen", socket,
                             "--tokenizer", nobody, "--trunk", nobody, "--sampler", nobody});
    const Deadline deadline = Deadline::after_ms(30000);
    Ended alive;
    do alive = world.k3pipe({"probe", socket, "--alive"});
    while (alive.code != 0 && !deadline.expired());
    CHECK(alive.code == 0);
    CHECK(has(alive.out, "loading"));
    const Ended ready = world.k3pipe({"probe", socket});
    CHECK(ready.code == 5);
    CHECK(has(ready.sentence(), "is loading"));
    gateway.signal(SIGTERM);
    CHECK(gateway.wait().code == 0);
}
