#include "tests/support/slurm_cluster.h"

#include <doctest/doctest.h>
#include <sys/random.h>
#include <unistd.h>

#include <array>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <thread>

#include "common/base/deadline.h"

namespace k3::test {

namespace fs = std::filesystem;

namespace {

constexpr std::int64_t kStartMs = 180000;
constexpr const char* kPath = "PATH=$PATH:/usr/sbin:/sbin ";

std::string why_no_slurm() {
    if (!boxes_can_be_made()) return "it needs boxes";
    for (const char* program : {"munged", "slurmctld", "slurmd", "srun", "salloc", "setpriv"}) {
        bool ok = false;
        run_shell(std::string(kPath) + "command -v " + program, &ok);
        if (!ok)
            return std::string(program) +
                   " is not installed (./dev setup --tests: munge, slurmctld, slurmd, "
                   "slurm-client)";
    }
    return "";
}

std::string own_name() {
    std::array<char, 256> name = {};
    ::gethostname(name.data(), name.size() - 1);
    const std::string text = name.data();
    return text.substr(0, text.find('.'));
}

}  // namespace

bool slurm_can_be_run() {
    static const std::string why = why_no_slurm();
    static const bool said = [] {
        if (!why.empty() && boxes_can_be_made()) std::printf("NOT RUN: %s\n", why.c_str());
        return true;
    }();
    return said && why.empty();
}

SlurmCluster::SlurmCluster(const World& world, const Boxes& boxes, std::size_t n)
    : directory_(world.path() / "slurm") {
    const std::string here = directory_.string();
    fs::create_directories(directory_ / "state");
    std::array<char, 1024> key = {};
    REQUIRE(::getrandom(key.data(), key.size(), 0) == static_cast<ssize_t>(key.size()));
    std::ofstream(directory_ / "munge.key").write(key.data(), key.size());
    fs::permissions(directory_ / "munge.key", fs::perms::owner_read | fs::perms::owner_write);
    std::ofstream settings(directory_ / "slurm.conf");
    settings << "ClusterName=boxes\nSlurmctldHost=" << own_name() << "(10.77.0.1)\n"
             << "SlurmUser=root\nAuthType=auth/munge\nAuthInfo=socket=" << here << "/munge.sock\n"
             << "StateSaveLocation=" << here << "/state\nSlurmdSpoolDir=" << here << "/spool-%n\n"
             << "SlurmctldPidFile=" << here << "/slurmctld.pid\nSlurmdPidFile=" << here
             << "/slurmd-%n.pid\nSlurmctldLogFile=" << here
             << "/slurmctld.log\nSlurmdLogFile=" << here << "/slurmd-%n.log\n"
             << "ProctrackType=proctrack/linuxproc\nTaskPlugin=task/none\n"
             << "SelectType=select/cons_tres\nSelectTypeParameters=CR_Core_Memory\n"
             << "SchedulerParameters=sched_interval=1,bf_interval=1\nMpiDefault=none\n"
             << "SlurmdTimeout=30\nKillWait=3\nReturnToService=2\n"
             << "SlurmdParameters=config_overrides\n";
    for (std::size_t i = 0; i < n; ++i)
        settings << "NodeName=box" << i << " NodeAddr=" << boxes.address(i)
                 << " CPUs=4 RealMemory=4000 State=UNKNOWN\n";
    settings << "PartitionName=main Nodes=ALL Default=YES State=UP\n"
             << "PartitionName=closed Nodes=ALL State=DOWN\n";
    settings.close();
    ::setenv("SLURM_CONF", (directory_ / "slurm.conf").c_str(), 1);

    start_daemon(world, "munged --foreground --force --key-file=" + here +
                            "/munge.key --socket=" + here + "/munge.sock --pid-file=" + here +
                            "/munge.pid --log-file=" + here + "/munge.log --seed-file=" + here +
                            "/munge.seed");
    REQUIRE_MESSAGE(wait_until("munge --no-input --socket=" + here + "/munge.sock"),
                    read_file(directory_ / "munge.log"));
    start_daemon(world, "slurmctld -D");
    // A slurmd that does not find it is known only when slurmctld looks for its nodes again.
    REQUIRE_MESSAGE(wait_until("scontrol ping | grep -q 'is UP'"),
                    read_file(directory_ / "slurmctld.log"));
    for (std::size_t i = 0; i < n; ++i) {
        fs::create_directories(directory_ / ("spool-box" + std::to_string(i)));
        // Only when it has become slurmd has it left the session that ends with this shell.
        boxes.run(i, std::string(kPath) +
                         "setsid -f slurmd -D >/dev/null 2>&1 </dev/null; "
                         "until pgrep -x slurmd >/dev/null; do sleep 0.02; done");
    }
    const std::string idle =
        "test \"$(sinfo --noheader --partition=main --states=idle "
        "--format=%D)\" = " +
        std::to_string(n);
    REQUIRE_MESSAGE(wait_until(idle), run("sinfo; tail -n 20 " + here + "/*.log"));
}

SlurmCluster::~SlurmCluster() {
    daemons_.clear();
    ::unsetenv("SLURM_CONF");
    std::error_code code;
    fs::remove_all(directory_, code);
}

void SlurmCluster::start_daemon(const World& world, const std::string& command) {
    daemons_.push_back(world.start_program(
        {"/bin/sh", "-c",
         std::string(kPath) + "exec setpriv --pdeathsig KILL " + command + " >/dev/null 2>&1"}));
}

bool SlurmCluster::wait_until(const std::string& shell_condition) const {
    const Deadline deadline = Deadline::after_ms(kStartMs);
    for (bool ok = false; !deadline.expired();) {
        run_shell(shell_condition, &ok);
        if (ok) return true;
        std::this_thread::sleep_for(std::chrono::milliseconds(50));
    }
    return false;
}

std::string SlurmCluster::run(const std::string& shell_command) {
    bool ok = false;
    return run_shell(shell_command, &ok);
}

std::string SlurmCluster::job() {
    const std::string listed = run("squeue --noheader --format=%A");
    return listed.substr(0, listed.find('\n'));
}

bool SlurmCluster::has_no_job(std::int64_t ms) {
    const Deadline deadline = Deadline::after_ms(ms);
    std::string left;
    do {
        // Those that ended stay in the list for a while.
        left = run("squeue --noheader; squeue --noheader --steps");
        if (left.empty()) return true;
        std::this_thread::sleep_for(std::chrono::milliseconds(50));
    } while (!deadline.expired());
    MESSAGE("a job is left: " << left);
    return false;
}

}  // namespace k3::test
