#pragma once
// How commands of ours are run on the other boxes of a pipeline: over ssh (ssh_remote.h), or as
// steps of a Slurm job (slurm_remote.h). All else that is done there (host_setup.h, host_starter.h)
// is the same for both.

#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "common/base/error.h"
#include "launcher/run_program.h"

namespace k3::launcher {

class Remote {
  public:
    virtual ~Remote() = default;
    Remote() = default;
    Remote(const Remote&) = delete;
    Remote& operator=(const Remote&) = delete;

    /// argv of a client here, its program a path, that has the POSIX shell of `host` run `script`.
    /// Standard input, output and exit status are those of the script, and a signal that ends it is
    /// 128 plus its number. The script does not outlive the client for long (host_protocol.h).
    virtual std::vector<std::string> command(const std::string& host,
                                             std::string_view script) const = 0;
    /// Why the client could not run the script: its output says so. Nothing: the script has run,
    /// and the exit code is its own.
    virtual std::optional<Error> fault(const std::string& host, const ProgramRun& run) const = 0;
    /// Whether a line of its output is the client's own, and not the script's.
    virtual bool is_own_line(std::string_view /*line*/) const { return false; }
    /// For people: a command that shows whether the host can be reached.
    virtual std::string by_hand(const std::string& host) const = 0;
    /// Why no command can be run on any host any more; nothing, if one can or that is not known.
    /// For whenever a client has ended: may take some seconds. One thread calls it.
    virtual std::optional<Error> lost() { return std::nullopt; }
};

}  // namespace k3::launcher
