#pragma once
// The pipeline file: which stages a pipeline has, and what the launcher and the services are told.
//
// One TOML file describes one pipeline: [pipeline], a table per stage, and one for each other box
// ([hosts.NAME]); [slurm] says what is asked of that cluster. Some keys of a stage are the
// launcher's own (binary, endpoint, wrap, listen, env, restart, terminal, name, count, model,
// host); every other key is a setting of the service and is passed on as a flag, so a new setting
// of a service needs no change here. docs/operating.md is the reference.

#include <cstdint>
#include <filesystem>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "common/base/result.h"
#include "common/transport/messages/control.h"

namespace k3::launcher {

/// A setting that the service is given: `cache_bytes = "1GiB"` becomes `--cache-bytes 1GiB`.
struct ServiceSetting {
    std::string name;                 // snake_case, as in the file
    std::vector<std::string> values;  // several: the flag is repeated; none: a bare flag
};

/// What a box can do, for `k3pipe plan --simulate`; 0: as measured here or given by flags.
struct BoxFigures {
    std::uint64_t disk_rate = 0;  // bytes per second
    std::uint64_t memory_rate = 0;
    std::uint64_t link_rate = 0;  // to and from the trunk's box
    std::int64_t round_trip_us = 0;
};

enum class RestartPolicy { on_failure, never };

struct StageSpec {
    msg::ServiceKind kind = msg::ServiceKind::unknown;
    std::string name;               // unique: "trunk", "experts-1"
    std::uint32_t line = 0;         // of its table in the file; 0: not written, defaults apply
    std::string binary;             // program or path; empty: k3-<kind> beside k3pipe
    std::string endpoint;           // not empty: a process that already runs, not ours
    std::vector<std::string> wrap;  // words in front of the command
    std::string listen;             // empty: a socket in the run directory
    std::string host;               // a HostSpec's name; empty: the launcher's box
    std::filesystem::path model;    // empty: its host's, or the pipeline's
    std::vector<std::pair<std::string, std::string>> env;
    RestartPolicy restart = RestartPolicy::on_failure;
    bool terminal = false;  // it gets the launcher's terminal (a debugger)
    std::int64_t weight =
        0;  // of an expert server, in a placement and among replicas; 0: not given
    BoxFigures box;
    std::vector<ServiceSetting> settings;

    bool attached() const noexcept { return !endpoint.empty(); }
    const ServiceSetting* find(std::string_view setting) const noexcept;
};

/// Another box, reached over ssh or through Slurm.
struct HostSpec {
    std::string name;             // the ssh destination: "user@box", or an alias of ssh's settings
    std::uint32_t line = 0;       // of its table; 0: only stages name it
    std::string address;          // numeric; empty until resolve_addresses()
    std::filesystem::path model;  // checkpoint directory there; empty: the pipeline's path
    std::string binary;           // k3pipe there: a path or name; empty: ours is copied
    bool shared_files = false;    // ours is copied only if it does not lie there as it does here
};

/// What a Slurm job of the pipeline's own is asked for (slurm_allocation.h).
struct SlurmSpec {
    std::uint32_t line = 0;  // of its table; 0: there is none
    std::int64_t nodes = 0;  // 0: one for each expert server and trunk stage
    std::int64_t cpus = 0;   // of each node; 0: whole nodes
    std::string mem;         // of each node, as --mem takes it
    std::string partition;
    std::string account;
    std::string qos;
    std::string time;                // limit, as --time takes it
    std::vector<std::string> extra;  // further words for salloc
};

struct PipelineSpec {
    std::filesystem::path file;
    std::string name;                 // of the run directory; [A-Za-z0-9_-], at most 40
    std::filesystem::path model;      // checkpoint directory; empty if every stage is attached
    std::filesystem::path placement;  // which expert server holds what; empty: as shares say
    std::filesystem::path run_dir;    // where run directories are made; empty: the default place
    std::filesystem::path keys;       // key file; empty: the default place (pipeline_keys.h)
    std::string payload = "shm";
    std::string log_level = "info";
    std::int64_t start_timeout_s = 120;  // without any progress
    std::int64_t attach_timeout_ms = 2000;
    std::int64_t max_restarts = 5;  // of one stage within restart_window_s
    std::int64_t restart_window_s = 60;
    bool insecure = false;                   // addresses beyond this box without keys
    std::vector<std::string> ssh = {"ssh"};  // the client, and words of the user's own
    std::string address;                     // of this box, as others reach it; numeric
    std::int64_t port_base = 5800;           // stage i is given port_base + i, if it needs one
    std::vector<HostSpec> hosts;             // every box that a table or a stage names
    std::string client = "ssh";              // the program that starts stages there, for people
    SlurmSpec slurm;                         // only with --slurm
    std::vector<StageSpec> stages;  // tokenizer, sampler, experts, trunk in layer order, gateway

    std::vector<const StageSpec*> of_kind(msg::ServiceKind kind) const;
    /// Null for the launcher's own box.
    const HostSpec* host_of(const StageSpec& stage) const noexcept;
    bool has_remote() const noexcept;  // some stage to be started on another box
};

/// Errors: not_found / io (file), invalid_argument (syntax, unknown table or key with the nearest
/// known one, a wrong type or value); all name the file and the line.
Result<PipelineSpec> load_pipeline(const std::filesystem::path& file);
/// The same from text; relative paths in it are relative to the folder of `file`.
Result<PipelineSpec> parse_pipeline(std::string_view text, const std::filesystem::path& file);

}  // namespace k3::launcher
