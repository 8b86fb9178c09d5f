#pragma once
// The verbs of k3pipe. Each returns the exit code; docs/operating.md has the table.

#include "launcher/cli.h"

namespace k3::launcher {

int up(const UpCommand& command);
int run(const RunCommand& command);
int status(const StatusCommand& command);
int down(const DownCommand& command);
int plan(const PlanCommand& command);
int placement(const PlacementCommand& command);
int init(const InitCommand& command);
int doctor(const DoctorCommand& command);
int synth(const SynthCommand& command);
int pack_checkpoint(const PackCommand& command);
int verify(const VerifyCommand& command);
int keys(const KeysCommand& command);
int render(const RenderCommand& command);
int probe(const ProbeCommand& command);

/// Prints "k3pipe: <sentence>" on stderr and returns the exit code of the error.
int report(const Error& error);

/// The pipeline file to use: `given`, or the shipped demo.toml.
Result<std::filesystem::path> config_or_default(const std::filesystem::path& given);

struct RunningPipeline {
    std::string name;
    std::string gateway;
    std::string keys;  // path; empty: none
    std::int64_t pid = 0;
};
/// The running pipeline `name`, or the only one. `naming` is how one is named: "k3pipe down NAME".
/// Errors: invalid_argument (several run, and none is named), unavailable (none runs).
Result<RunningPipeline> find_running(const std::filesystem::path& run_dir, const std::string& name,
                                     std::string_view naming);

}  // namespace k3::launcher
