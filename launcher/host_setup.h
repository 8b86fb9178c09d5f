#pragma once
// Making the other boxes of a pipeline ready, before anything is started anywhere.
//
// Nothing has to be installed there: unless [hosts] names a k3pipe, this build's programs are
// copied (over ssh, or through srun) into ~/.cache/k3pipe/build-<digest of them>, once, and
// verified there before they get that name. All boxes are asked at once, and all that is wrong is
// said at once.

#include <map>
#include <string>
#include <vector>

#include "common/base/result.h"
#include "launcher/events.h"
#include "launcher/pipeline_file.h"
#include "launcher/remote.h"
#include "launcher/stage_plan.h"

namespace k3::launcher {

struct HostSetup {
    std::map<std::string, std::string> host_stage;  // shell command that is `k3pipe host-stage`
    std::vector<Error> faults;                      // each names its box
};

/// `spec` has been through resolve_addresses(). Takes seconds, or minutes where programs have to be
/// copied over a slow link; says so to `events`, and gives up when `stop_fd` (of StopSignals, which
/// must have been taken) becomes readable. Uses threads, which are gone when it returns.
/// Faults: a box that is not reached, does not let us in or is not known; a checkpoint or library
/// that is missing there; a port that is taken; our own programs that cannot be read.
HostSetup prepare_hosts(const PipelineSpec& spec, const Remote& remote, const PipelinePlan& plan,
                        const EventLog& events, int stop_fd);

/// All faults as one: the only one as it is, several after each has been said to `events`.
Error combined(const std::vector<Error>& faults, const EventLog& events);

/// What the script on a box found; lines of others (a banner, a profile that talks) are skipped.
struct HostReport {
    std::string machine;                 // uname -m
    std::string program;                 // its k3pipe, a path; empty: there is none
    bool is_not_executable = false;      // binary of [hosts] is there, but no program
    std::string version;                 // what it says of itself: "k3pipe 0.1.0"
    std::vector<std::string> libraries;  // lines of ldd that say "not found"
    std::vector<std::string> no_models;  // directories without a config.json
};
HostReport parse_report(const std::string& output);

}  // namespace k3::launcher
