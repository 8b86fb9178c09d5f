#pragma once
// Which verbs and flags k3pipe has, and what --help prints.

#include <memory>
#include <string>

#include "launcher/cli.h"

namespace CLI {  // NOLINT(readability-identifier-naming): the library calls it so
class App;
}

namespace k3::launcher {

/// What CLI11 fills; cli.cc makes a command of it.
struct RawCommands {
    UpCommand up;
    RunCommand run;
    StatusCommand status;
    DownCommand down;
    PlanCommand plan;
    PlacementCommand placement;
    InitCommand init;
    DoctorCommand doctor;
    SynthCommand synth;
    PackCommand pack;
    VerifyCommand verify;
    KeysCommand keys;
    RenderCommand render;
    ProbeCommand probe;
    std::string pack_kind;
    std::string render_kind;
    std::string pack_list;
    std::string pack_part;
    std::string effort = "off";
    std::string attach;
};

struct Verbs {
    CLI::App* up;
    CLI::App* run;
    CLI::App* status;
    CLI::App* down;
    CLI::App* plan;
    CLI::App* placement;
    CLI::App* init;
    CLI::App* doctor;
    CLI::App* synth;
    CLI::App* pack;
    CLI::App* verify;
    CLI::App* keys;
    CLI::App* render;
    CLI::App* probe;
};

/// The whole command line, not parsed yet. `raw` must outlive it.
std::unique_ptr<CLI::App> declare_command_line(RawCommands& raw, Verbs* verbs);

}  // namespace k3::launcher
