#include "tests/support/boxes.h"

#include <doctest/doctest.h>
#include <fcntl.h>
#include <sched.h>
#include <signal.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <fstream>
#include <iterator>
#include <thread>

#include "common/base/deadline.h"
#include "common/base/fd.h"
#include "launcher/endpoint_probe.h"
#include "launcher/run_program.h"

namespace k3::test {

namespace fs = std::filesystem;

namespace {

constexpr std::int64_t kProgramMs = 20000;
constexpr std::int64_t kSshdMs = 20000;

void must(const std::string& command) {
    bool ok = false;
    const std::string said = run_shell(command, &ok);
    REQUIRE_MESSAGE(ok, command << ": " << said);
}

std::string why_not() {
    if (::geteuid() != 0) return "boxes are namespaces, and only root may make them";
    bool ok = false;
    for (const char* program : {"ip", "sshd", "ssh", "ssh-keygen", "nsenter"}) {
        run_shell(std::string("PATH=$PATH:/usr/sbin:/sbin command -v ") + program, &ok);
        if (!ok)
            return std::string(program) +
                   " is not installed (./dev setup --tests: iproute2, openssh-server)";
    }
    const std::string said = run_shell("unshare --net --mount --pid --uts --fork true", &ok);
    return ok ? "" : "namespaces cannot be made here: " + said;
}

/// The network of the test program, once: a bridge that is its own address too.
void enter_own_network() {
    static bool entered = false;
    if (entered) return;
    entered = true;
    REQUIRE(::unshare(CLONE_NEWNET) == 0);
    must(
        // An address of its own: that of a port would change with the ports.
        "ip link set lo up && ip link add k3net address 02:6b:33:00:01:00 type bridge && "
        "ip addr add 10.77.0.1/24 dev k3net && ip link set k3net up");
}

void write_text(const fs::path& file, const std::string& text) {
    std::ofstream(file) << text;
    fs::permissions(file, fs::perms::owner_read | fs::perms::owner_write);
}

/// Process 1 of a box: makes its mounts, starts sshd when the network is there, buries the dead.
/// After a fork of a program with threads: only what needs no lock of theirs.
[[noreturn]] void init_main(const std::string& name, const char* sshd_settings, int network_ready) {
    ::prctl(PR_SET_PDEATHSIG, SIGKILL);
    ::setsid();
    if (::sethostname(name.data(), name.size()) != 0 ||
        ::mount("none", "/", nullptr, MS_REC | MS_PRIVATE, nullptr) != 0 ||
        ::mount("proc", "/proc", "proc", 0, nullptr) != 0 ||
        ::mount("shm", "/dev/shm", "tmpfs", 0, "size=256m") != 0 ||
        ::mount("run", "/run", "tmpfs", 0, "size=1m") != 0 || ::mkdir("/run/sshd", 0755) != 0)
        ::_exit(1);
    char byte = 0;
    if (::read(network_ready, &byte, 1) != 1) ::_exit(1);
    const int null = ::open("/dev/null", O_RDWR);
    for (int fd : {0, 1, 2}) ::dup2(null, fd);
    ::close_range(3, ~0U, 0);
    if (::fork() == 0) {
        ::execl("/usr/sbin/sshd", "/usr/sbin/sshd", "-D", "-f", sshd_settings, nullptr);
        ::_exit(127);
    }
    for (;;)
        if (::wait(nullptr) < 0) ::pause();
}

std::string within(pid_t init, const std::string& shell_command) {
    std::string quoted;
    for (char c : shell_command) quoted += c == '\'' ? "'\\''" : std::string(1, c);
    return "nsenter -t " + std::to_string(init) + " -n -m -p -u -- /bin/sh -c '" + quoted + "'";
}

std::vector<std::string> lines_of(const std::string& text) {
    std::vector<std::string> lines;
    for (std::size_t begin = 0; begin < text.size();) {
        const std::size_t end = std::min(text.find('\n', begin), text.size());
        if (end > begin) lines.push_back(text.substr(begin, end - begin));
        begin = end + 1;
    }
    return lines;
}

}  // namespace

std::string run_shell(const std::string& command, bool* ok) {
    auto run = launcher::run_program({"/bin/sh", "-c", command}, Deadline::after_ms(kProgramMs));
    *ok = run.has_value() && !run->timed_out && run->ending.exit_code() == 0;
    return run.has_value() ? run->output : run.error().sentence();
}

bool boxes_can_be_made() {
    static const std::string why = why_not();
    static const bool said = [] {
        if (!why.empty()) std::printf("NOT RUN: %s\n", why.c_str());
        return true;
    }();
    return said && why.empty();
}

Boxes::Boxes(fs::path directory, std::size_t n) : directory_(std::move(directory)), boxes_(n) {
    enter_own_network();
    for (std::size_t i = 0; i < n; ++i)
        for (const char* folder : {"home", "run"}) fs::create_directories(disk(i) / folder);
    write_keys_and_settings();
    for (std::size_t i = 0; i < n; ++i) power_on(i);
}

Boxes::~Boxes() {
    for (std::size_t i = 0; i < boxes_.size(); ++i) {
        if (is_on(i)) power_off(i);
        std::error_code code;
        fs::remove_all(disk(i), code);
    }
}

std::string Boxes::address(std::size_t box) const { return "10.77.0." + std::to_string(10 + box); }

fs::path Boxes::disk(std::size_t box) const { return directory_ / ("box" + std::to_string(box)); }

void Boxes::write_keys_and_settings() const {
    const std::string here = directory_.string();
    for (const char* key : {"host_key", "user_key"})
        must("test -f " + here + "/" + key + " || ssh-keygen -q -t ed25519 -N '' -f " + here + "/" +
             key);
    std::ifstream key_file(directory_ / "host_key.pub");
    const std::string host_key(std::istreambuf_iterator<char>(key_file), {});
    std::string known;
    std::string settings;
    for (std::size_t i = 0; i < boxes_.size(); ++i) {
        must("cp " + here + "/user_key.pub " + disk(i).string() + "/authorized_keys");
        known += address(i) + " " + host_key;
        settings += "Host box" + std::to_string(i) + "\n  HostName " + address(i) + "\n";
        write_text(disk(i) / "sshd_config",
                   "ListenAddress " + address(i) + "\nHostKey " + here + "/host_key\n" +
                       "AuthorizedKeysFile " + disk(i).string() + "/authorized_keys\n" +
                       "StrictModes no\nUsePAM no\nUseDNS no\nPidFile none\nPermitRootLogin yes\n" +
                       "PasswordAuthentication no\nLogLevel QUIET\nSetEnv HOME=" +
                       (disk(i) / "home").string() + " XDG_RUNTIME_DIR=" +
                       (disk(i) / "run").string() + " OMP_WAIT_POLICY=passive\n");
    }
    write_text(directory_ / "known_hosts", known);
    write_text(ssh_settings(), settings + "Host *\n  User root\n  IdentityFile " + here +
                                   "/user_key\n  IdentitiesOnly yes\n  UserKnownHostsFile " + here +
                                   "/known_hosts\n  GlobalKnownHostsFile none\n");
}

std::string Boxes::pipeline_keys() const {
    return "ssh = 'ssh -F " + ssh_settings().string() + "'\ninsecure = true\n";
}

void Boxes::power_on(std::size_t box) {
    REQUIRE_FALSE(is_on(box));
    const std::string settings = (disk(box) / "sshd_config").string();
    const std::string name = "box" + std::to_string(box);
    int ready[2] = {-1, -1};
    REQUIRE(::pipe2(ready, O_CLOEXEC) == 0);
    // The namespace of processes is entered by the first child; the others at once.
    int back[2] = {-1, -1};
    REQUIRE(::pipe2(back, O_CLOEXEC) == 0);
    const pid_t parent = ::fork();
    REQUIRE(parent >= 0);
    if (parent == 0) {
        ::prctl(PR_SET_PDEATHSIG, SIGKILL);
        if (::unshare(CLONE_NEWNET | CLONE_NEWNS | CLONE_NEWPID | CLONE_NEWUTS) != 0) ::_exit(1);
        const pid_t init = ::fork();
        if (init == 0) init_main(name, settings.c_str(), ready[0]);
        [[maybe_unused]] ssize_t told = ::write(back[1], &init, sizeof init);
        ::close_range(3, ~0U, 0);
        while (::waitpid(init, nullptr, 0) < 0 && errno == EINTR) {
        }
        ::_exit(0);
    }
    Fd network(ready[1]);
    ::close(ready[0]);
    ::close(back[1]);
    pid_t init = -1;
    REQUIRE(::read(back[0], &init, sizeof init) == sizeof init);
    ::close(back[0]);
    REQUIRE(init > 0);
    boxes_[box].init = init;
    boxes_[box].keeper = parent;
    const std::string cable = "k3box" + std::to_string(box);
    // A box keeps its hardware address over a restart; with another one its neighbours would send
    // to the old one until their table of addresses forgets it, which takes up to a minute.
    char hardware[32];
    std::snprintf(hardware, sizeof hardware, "02:6b:33:00:00:%02zx", box);
    must("ip link add " + cable + " type veth peer name eth0 address " + hardware + " netns " +
         std::to_string(init) + " && ip link set " + cable + " master k3net up && nsenter -t " +
         std::to_string(init) + " -n sh -c 'ip link set lo up && ip addr add " + address(box) +
         "/24 dev eth0 && ip link set eth0 up'");
    REQUIRE(::write(network.get(), "x", 1) == 1);
    const Deadline deadline = Deadline::after_ms(kSshdMs);
    while (launcher::probe_endpoint("tcp://" + address(box) + ":22", 200).finding !=
           launcher::EndpointProbe::Finding::listening) {
        REQUIRE_MESSAGE(!deadline.expired(), "the sshd of box" << box << " does not listen");
        std::this_thread::sleep_for(std::chrono::milliseconds(20));
    }
}

void Boxes::power_off(std::size_t box) {
    REQUIRE(is_on(box));
    if (boxes_[box].link) set_link(box, std::nullopt);
    ::kill(boxes_[box].init, SIGKILL);
    while (::waitpid(boxes_[box].keeper, nullptr, 0) < 0 && errno == EINTR) {
    }
    boxes_[box] = Box();
    // The kernel takes a network down some time after its last process.
    bool ok = false;
    run_shell("ip link del k3box" + std::to_string(box), &ok);
    // What a box keeps in memory is gone with its power; its disk is not.
    for (const auto& entry : fs::directory_iterator(disk(box) / "run")) fs::remove_all(entry);
}

std::string Boxes::run(std::size_t box, const std::string& shell_command) const {
    REQUIRE(is_on(box));
    bool ok = false;
    return run_shell(within(boxes_[box].init, shell_command), &ok);
}

std::vector<std::string> Boxes::leftovers(std::size_t box) const {
    return lines_of(run(box,
                        "ps -eo comm,args | grep -E '^(k3|ssh -|slurmstepd)' | grep -v grep; "
                        "find " +
                            (disk(box) / "run").string() +
                            " -mindepth 1; "
                            "find /dev/shm -mindepth 1"));
}

bool Boxes::all_clean(std::int64_t ms) const {
    const Deadline deadline = Deadline::after_ms(ms);
    for (std::size_t i = 0; i < boxes_.size(); ++i) {
        if (!is_on(i)) continue;
        for (;;) {
            const std::vector<std::string> left = leftovers(i);
            if (left.empty()) break;
            if (deadline.expired()) {
                for (const std::string& line : left) MESSAGE("left on box" << i << ": " << line);
                return false;
            }
            std::this_thread::sleep_for(std::chrono::milliseconds(50));
        }
    }
    return true;
}

std::string Boxes::port(std::size_t box) const {
    return (boxes_[box].link ? "k3port" : "k3box") + std::to_string(box);
}

void Boxes::set_link(std::size_t box, const std::optional<LinkShape>& shape) {
    REQUIRE(is_on(box));
    const std::string number = std::to_string(box);
    const std::string cable = "k3box" + number;
    if (boxes_[box].link && shape.has_value()) return boxes_[box].link->set_shape(*shape);
    if (shape.has_value()) {
        must("ip link set " + cable + " nomaster && ip link add k3port" + number +
             " type veth peer name k3mid" + number + " && ip link set k3port" + number +
             " master k3net up");
        boxes_[box].link = std::make_unique<DelayLink>("k3mid" + number, cable, *shape);
    } else if (boxes_[box].link) {
        boxes_[box].link.reset();
        must("ip link del k3port" + number + " && ip link set " + cable + " arp on master k3net");
    }
}

DelayLink::Counts Boxes::link_counts(std::size_t box) const {
    return boxes_[box].link ? boxes_[box].link->counts() : DelayLink::Counts();
}

void Boxes::pull_cable(std::size_t box) { must("ip link set " + port(box) + " nomaster"); }

void Boxes::plug_in(std::size_t box) { must("ip link set " + port(box) + " master k3net"); }

}  // namespace k3::test
