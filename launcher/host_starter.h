#pragma once
// Starting stages here and on other boxes.
//
// A stage of another box is a client here (ssh, srun: remote.h) that runs `k3pipe host-stage` there
// (host_stage.h): one connection for its description, its signals and its log. It is watched and
// reaped like any child; the connection ends with us, however we end, and the stage with it.

#include <cstdint>
#include <filesystem>
#include <map>
#include <memory>
#include <string>

#include "common/transport/curve_keys.h"
#include "launcher/remote.h"
#include "launcher/starter.h"

namespace k3::launcher {

struct HostOptions {
    std::shared_ptr<Remote> remote;
    std::map<std::string, std::string> host_stage;  // host: the shell command that is host-stage
    std::string pipeline;
    std::uint64_t run_id = 0;
    std::shared_ptr<const transport::CurveKeys> keys = nullptr;  // null: no stage needs them
    std::filesystem::path placement = {};  // as arguments call it ("@FILE#NAME"); empty: none
    std::string placement_text = {};       // what boxes are handed under that name
};

/// Commands without a host go to `local`. The ending of a remote stage is that of its service;
/// exit code 255 says that an ssh connection failed or was lost. Starts a thread that tells every
/// box that we are alive. SIGPIPE must be ignored (stop_signals.h).
std::unique_ptr<ProcessStarter> make_host_starter(std::unique_ptr<ProcessStarter> local,
                                                  HostOptions options);

}  // namespace k3::launcher
