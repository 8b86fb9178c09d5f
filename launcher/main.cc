// k3pipe: the launcher and the command line.

#include <fcntl.h>

#include <csignal>
#include <cstdio>
#include <iostream>
#include <system_error>
#include <variant>

#include "launcher/cli.h"
#include "launcher/commands.h"
#include "launcher/host_stage.h"

namespace {

struct Dispatch {
    int operator()(const k3::launcher::NothingCommand&) const { return k3::kExitOk; }
    int operator()(const k3::launcher::UpCommand& command) const { return up(command); }
    int operator()(const k3::launcher::RunCommand& command) const { return run(command); }
    int operator()(const k3::launcher::StatusCommand& command) const { return status(command); }
    int operator()(const k3::launcher::DownCommand& command) const { return down(command); }
    int operator()(const k3::launcher::PlanCommand& command) const { return plan(command); }
    int operator()(const k3::launcher::PlacementCommand& command) const {
        return placement(command);
    }
    int operator()(const k3::launcher::InitCommand& command) const { return init(command); }
    int operator()(const k3::launcher::DoctorCommand& command) const { return doctor(command); }
    int operator()(const k3::launcher::SynthCommand& command) const { return synth(command); }
    int operator()(const k3::launcher::PackCommand& command) const {
        return pack_checkpoint(command);
    }
    int operator()(const k3::launcher::HostStageCommand&) const {
        return k3::launcher::host_stage();
    }
    int operator()(const k3::launcher::VerifyCommand& command) const { return verify(command); }
    int operator()(const k3::launcher::KeysCommand& command) const { return keys(command); }
    int operator()(const k3::launcher::RenderCommand& command) const { return render(command); }
    int operator()(const k3::launcher::ProbeCommand& command) const { return probe(command); }
};

/// Started without standard descriptors (by some daemons), our first pipes would become them. What
/// is written to a standard output that is not there is still an error: that one is for reading.
void open_standard_descriptors() {
    for (int fd : {0, 1, 2})
        if (::fcntl(fd, F_GETFD) < 0) [[maybe_unused]]
            int opened = ::open("/dev/null", fd == 2 ? O_WRONLY : O_RDONLY);  // the lowest free: fd
}

/// Help and plans are output, too: a full disk must not look like success, or like a bug: what
/// prints more than its buffer holds throws there.
int with_flushed_output(const k3::launcher::CommandLine& command) {
    int code = k3::kExitOk;
    try {
        code = std::visit(Dispatch{}, command);
    } catch (const std::system_error&) {
        if (std::ferror(stdout) == 0) throw;
    }
    if (std::fflush(stdout) == 0 && std::ferror(stdout) == 0 && std::cout.flush().good())
        return code;
    if (code != k3::kExitOk) return code;
    return k3::launcher::report(k3::Error{k3::ErrorCode::resource_exhausted,
                                          "cannot write to standard output",
                                          "check where it goes to, and the disk there"});
}

}  // namespace

int main(int argc, char** argv) {
    open_standard_descriptors();
    ::signal(SIGXFSZ, SIG_IGN);  // the write fails and is reported; children inherit it
    auto command = k3::launcher::parse_command_line(argc, argv);
    if (!command.has_value()) return k3::launcher::report(command.error());
    return with_flushed_output(*command);
}
