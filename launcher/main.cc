// k3pipe: the launcher and the command line.

#include <fcntl.h>

#include <variant>

#include "launcher/cli.h"
#include "launcher/commands.h"

namespace {

struct Dispatch {
    int operator()(const k3::launcher::NothingCommand&) const { return k3::kExitOk; }
    int operator()(const k3::launcher::UpCommand& command) const { return up(command); }
    int operator()(const k3::launcher::RunCommand& command) const { return run(command); }
    int operator()(const k3::launcher::StatusCommand& command) const { return status(command); }
    int operator()(const k3::launcher::DownCommand& command) const { return down(command); }
    int operator()(const k3::launcher::PlanCommand& command) const { return plan(command); }
    int operator()(const k3::launcher::SynthCommand& command) const { return synth(command); }
};

/// Started without standard descriptors (by some daemons), our first pipes would become them.
void open_standard_descriptors() {
    for (int fd : {0, 1, 2})
        if (::fcntl(fd, F_GETFD) < 0) [[maybe_unused]]
            int opened = ::open("/dev/null", fd == 0 ? O_RDONLY : O_WRONLY);  // the lowest free: fd
}

}  // namespace

int main(int argc, char** argv) {
    open_standard_descriptors();
    auto command = k3::launcher::parse_command_line(argc, argv);
    if (!command.has_value()) return k3::launcher::report(command.error());
    return std::visit(Dispatch{}, *command);
}
