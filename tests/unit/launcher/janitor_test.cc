#include "launcher/janitor.h"

#include <doctest/doctest.h>
#include <fcntl.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <fstream>
#include <string>
#include <thread>

#include "common/base/deadline.h"
#include "launcher/run_directory.h"
#include "launcher/starter.h"
#include "tests/support/checkpoint_copy.h"

using namespace k3;
using namespace k3::launcher;
namespace fs = std::filesystem;

namespace {

constexpr std::uint64_t kRunId = 0xfeed'0000'0000'0000ULL;

std::uint64_t own_run_id() { return kRunId + static_cast<std::uint64_t>(::getpid()); }

std::string segment_file(std::uint64_t run_id) {
    char name[64] = {};
    std::snprintf(name, sizeof name, "/k3-%llx-test-1", static_cast<unsigned long long>(run_id));
    return name;
}

/// Lives as a launcher does: directory, janitor, a child that will not go by itself, a segment.
/// Then it is killed, or ends in good order. Returns never.
[[noreturn]] void be_a_launcher(const fs::path& base, std::uint64_t run_id, bool killed) {
    auto directory = RunDirectory::acquire(base, "a");
    auto janitor = Janitor::start({.run_directory = (*directory)->path(),
                                   .run_id = run_id,
                                   .patience_ms = 200,
                                   .last_command = {"/bin/sh", "-c", "echo >> \"$0\"",
                                                    (base / "taken-back").string()}},
                                  (*directory)->lock_fd());
    auto starter = make_local_starter();
    Command deaf;
    deaf.name = "deaf";
    deaf.argv = {"/bin/sh", "-c", "sleep 60"};
    auto child = (*starter)->start(deaf);
    (*starter)->signal(*child, SIGSTOP);  // hears no SIGTERM and sees no lifeline
    (*janitor)->watch(child->pid);
    std::ofstream((*directory)->path() / "trunk.sock") << "";
    ::close(::shm_open(segment_file(run_id).c_str(), O_CREAT | O_RDWR, 0600));
    if (killed) ::raise(SIGKILL);
    pid_t group = child->pid;
    (*starter)->signal(*child, SIGKILL);
    while (!(*starter)->reap(*child).has_value())
        std::this_thread::sleep_for(std::chrono::milliseconds(5));
    (*janitor)->forget(group);
    remove_segments(run_id);
    directory->reset();
    janitor->reset();
    ::_exit(0);
}

}  // namespace

TEST_CASE("when the launcher is gone nothing of its run is left") {
    // Orphans become our children: their ends can be waited for, and none can hide.
    REQUIRE(::prctl(PR_SET_CHILD_SUBREAPER, 1) == 0);
    test::TempDir temp;
    bool killed = false;
    SUBCASE("killed") { killed = true; }
    SUBCASE("ended") {}
    std::uint64_t run_id = own_run_id();
    pid_t launcher = ::fork();
    if (launcher == 0) be_a_launcher(temp.path(), run_id, killed);
    int status = 0;
    REQUIRE(::waitpid(launcher, &status, 0) == launcher);
    CHECK(WIFSIGNALED(status) == killed);

    Deadline deadline = Deadline::after_ms(5000);
    pid_t reaped = 0;
    while ((reaped = ::waitpid(-1, &status, WNOHANG)) >= 0 && !deadline.expired())
        if (reaped == 0) std::this_thread::sleep_for(std::chrono::milliseconds(10));
    CHECK(reaped == -1);  // no child left: neither the stopped process nor the janitor
    CHECK_FALSE(fs::exists(temp.path() / "a"));
    // At once, and again when the process that hears nothing has been killed.
    CHECK(fs::exists(temp.path() / "taken-back") == killed);
    if (killed) CHECK(test::read_file(temp.path() / "taken-back") == "\n\n");
    CHECK_FALSE(fs::exists("/dev/shm" + segment_file(run_id)));
}
