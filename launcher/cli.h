#pragma once
// The command line of k3pipe, parsed into plain structs. Only cli.cc and cli_flags.cc know CLI11.

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <variant>
#include <vector>

#include "common/base/result.h"
#include "common/model/synthetic.h"
#include "common/pack/format.h"
#include "common/transport/messages/sampler.h"
#include "launcher/model_files.h"

namespace k3::launcher {

struct UpCommand {
    std::filesystem::path config;  // empty: the shipped demo.toml
    std::string name;              // empty: the file's
    std::filesystem::path run_dir;
    bool verbose = false;
    bool slurm = false;  // expert servers and trunk stages run in a Slurm job
};

enum class Effort { off, low, high, max };

struct RunCommand {
    std::filesystem::path config;
    std::filesystem::path run_dir;
    bool verbose = false;
    bool slurm = false;

    // What is asked: exactly one of these four.
    std::optional<std::string> prompt;                 // -p
    std::optional<std::filesystem::path> prompt_file;  // -f; "-" is standard input
    std::optional<std::string> ids;                    // --ids 1,2,3
    std::optional<std::filesystem::path> messages;     // --messages FILE.json

    bool chat = false;  // prompt or file is one user message
    Effort effort = Effort::off;
    bool special = false;  // text that spells a special token is one

    msg::SamplingParams params;  // temperature 0 unless the user asked for sampling
    bool greedy = true;
    bool seed_given = false;
    std::uint32_t max_tokens = 256;
    std::vector<std::string> stops;
    bool ignore_eos = false;
    std::uint32_t n_logprobs = 0;

    std::filesystem::path session;       // to go on from; empty: none
    std::filesystem::path save_session;  // empty: not saved

    bool json = false;
    bool raw = false;  // chat: the markers of the chat format too
    std::filesystem::path logits_out;
    bool prompt_logits = false;

    bool attach = false;         // to a running pipeline
    std::string attach_name;     // empty: the only one
    std::string gateway;         // an endpoint instead
    std::filesystem::path keys;  // of either; empty: those that the running pipeline has
};

struct StatusCommand {
    std::string name;  // empty: all
    std::filesystem::path run_dir;
    bool json = false;
};

struct DownCommand {
    std::string name;  // empty: the only one
    std::filesystem::path run_dir;
};

struct PlanCommand {
    std::filesystem::path config;
    std::string name;
    std::filesystem::path run_dir;
    std::uint64_t disk_rate = 0;  // bytes per second; 0: measured
    std::uint64_t memory_rate = 0;

    std::filesystem::path simulate;  // a recorded routing to replay over the boxes; empty: none
    std::uint32_t rows = 1;          // of a step
    std::uint32_t boxes = 16;        // the table of equal boxes goes up to so many
    std::uint64_t link_rate = 0;  // bytes per second of a box whose table says nothing; 0: no limit
    std::uint32_t round_trip_us = 0;
};

struct PlacementCommand {
    std::filesystem::path config;
    std::filesystem::path out;    // file to write; empty: only the summary
    std::uint32_t replicas = 1;   // servers that hold an expert
    double replicated = 1;        // part of each layer's experts that have replicas
    std::filesystem::path trace;  // a recorded routing; empty: none
    bool shape_given = false;     // replicas or replicated
};

/// `k3pipe init`: writes a pipeline file with budgets for some memory.
struct InitCommand {
    ModelFiles files;
    std::filesystem::path output;  // empty: to standard output
    std::string preset = "auto";   // 8g, 16g, ..., max
};

struct DoctorCommand {
    std::filesystem::path config;  // at most one of these two; none: the machine only
    ModelFiles files;
};

struct SynthCommand {
    std::filesystem::path directory;
    model::SyntheticOptions options;
};

struct PackCommand {
    pack::Kind kind = pack::Kind::trunk;
    std::filesystem::path model;
    std::filesystem::path file;
    std::string layers = "all";  // trunk
    pack::Part part;             // trunk
    std::string share;           // experts: --share or --list
};

struct VerifyCommand {
    std::filesystem::path path;    // a checkpoint directory or a pack
    bool record = false;           // write the manifest
    std::filesystem::path sha256;  // file of sums; empty: none
};

/// `k3pipe keys`: makes the key file of a pipeline.
struct KeysCommand {
    std::filesystem::path config;
    std::string name;
    bool replace = false;
};

/// `k3pipe render`: files for those who have something that starts processes.
struct RenderCommand {
    enum class For { systemd, kubernetes };
    For manager = For::systemd;
    std::filesystem::path config;
    std::string name;
    std::filesystem::path out;       // folder; empty: to standard output
    std::filesystem::path programs;  // folder of our programs there; empty: as the plan says
    bool user_units = false;         // systemd: for systemctl --user
    std::string account;             // systemd: whose processes; empty: this user's
    std::string image;               // kubernetes, and the following
    std::string keys_secret;         // empty: k3pipe-NAME-keys
    std::string model_claim;         // persistent volume claim; empty: a folder of the node
};

/// `k3pipe probe`: whether one service is there.
struct ProbeCommand {
    std::string endpoint;
    std::filesystem::path keys;
    bool alive = false;  // one that still loads is fine
    std::uint32_t wait_ms = 3000;
};

/// One stage for a launcher on another box; no verb for people.
struct HostStageCommand {};

/// Nothing left to do: help or the version has been printed.
struct NothingCommand {};

using CommandLine =
    std::variant<NothingCommand, UpCommand, RunCommand, StatusCommand, DownCommand, PlanCommand,
                 PlacementCommand, InitCommand, DoctorCommand, SynthCommand, PackCommand,
                 VerifyCommand, KeysCommand, RenderCommand, ProbeCommand, HostStageCommand>;

/// Error: invalid_argument, with the nearest verb or flag where there is one.
Result<CommandLine> parse_command_line(int argc, const char* const* argv);

}  // namespace k3::launcher
