#include "launcher/slurm_placement.h"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

namespace k3::launcher {

using msg::ServiceKind;

namespace {

constexpr const char* kNobodysAddress = "192.0.2.1";  // for documentation, RFC 5737

bool is_dealt(const StageSpec& stage) {
    return !stage.attached() && stage.host.empty() &&
           (stage.kind == ServiceKind::experts || stage.kind == ServiceKind::trunk);
}

HostSpec& host_of(PipelineSpec& spec, const std::string& name) {
    for (HostSpec& host : spec.hosts)
        if (host.name == name) return host;
    HostSpec host;
    host.name = name;
    return spec.hosts.emplace_back(std::move(host));
}

/// Stages are listed with expert servers before trunk stages.
void deal(PipelineSpec& spec, const std::vector<SlurmNode>& nodes) {
    std::size_t next = 0;
    for (StageSpec& stage : spec.stages)
        if (is_dealt(stage)) stage.host = nodes[next++ % nodes.size()].name;
    for (const SlurmNode& node : nodes) {
        HostSpec& host = host_of(spec, node.name);
        host.shared_files = true;
        if (host.address.empty()) host.address = node.address;
    }
    spec.client = "srun";
}

}  // namespace

Result<std::size_t> nodes_for(const PipelineSpec& spec) {
    std::size_t n_dealt = 0;
    std::size_t n_named = 0;
    for (const StageSpec& stage : spec.stages) {
        n_dealt += is_dealt(stage) ? 1 : 0;
        n_named += !stage.attached() && !stage.host.empty() ? 1 : 0;
        if (is_dealt(stage) && stage.terminal)
            return Error{ErrorCode::invalid_argument,
                         fmt::format("{}:{}: {} wants the terminal, and --slurm starts it on a node",
                                     spec.file.string(), stage.line, stage.name),
                         "start the pipeline without --slurm to debug it"};
    }
    if (n_dealt + n_named == 0)
        return Error{ErrorCode::invalid_argument,
                     fmt::format("{}: --slurm has nothing to start: every expert server and trunk "
                                 "stage has an endpoint",
                                 spec.file.string()),
                     "leave out --slurm"};
    const std::size_t most = n_dealt + n_named;
    if (spec.slurm.nodes == 0) return most;
    if (static_cast<std::size_t>(spec.slurm.nodes) <= most)
        return static_cast<std::size_t>(spec.slurm.nodes);
    return Error{ErrorCode::invalid_argument,
                 fmt::format("{}:{}: [slurm] nodes = {}, and there are {} stages to put on them",
                             spec.file.string(), spec.slurm.line, spec.slurm.nodes, most),
                 "ask for as many nodes as there are expert servers and trunk stages, or fewer"};
}

Status place_on_nodes(PipelineSpec* spec, const SlurmAllocation& allocation) {
    return place_on_nodes(spec, allocation.job(), allocation.nodes());
}

Status place_on_nodes(PipelineSpec* spec, const std::string& job,
                      const std::vector<SlurmNode>& nodes) {
    for (const StageSpec& stage : spec->stages) {
        if (stage.attached() || stage.host.empty() ||
            std::any_of(nodes.begin(), nodes.end(),
                        [&stage](const SlurmNode& node) { return node.name == stage.host; }))
            continue;
        std::string names;
        for (const SlurmNode& node : nodes) names += (names.empty() ? "" : ", ") + node.name;
        return Error{ErrorCode::invalid_argument,
                     fmt::format("{}:{}: {} has host = '{}', which is no node of Slurm job {} ({})",
                                 spec->file.string(), stage.line, stage.name, stage.host, job,
                                 names),
                     "leave host out, or ask for that node (extra = \"--nodelist=...\" in [slurm])"};
    }
    deal(*spec, nodes);
    return Status::ok();
}

PipelineSpec placed_somewhere(const PipelineSpec& spec, std::size_t n_nodes) {
    PipelineSpec placed = spec;
    std::vector<SlurmNode> nodes;
    for (std::size_t i = 0; i < n_nodes; ++i)
        nodes.push_back({fmt::format("node {}", i), kNobodysAddress});
    deal(placed, nodes);
    for (HostSpec& host : placed.hosts) host.address = kNobodysAddress;
    placed.address = kNobodysAddress;
    return placed;
}

}  // namespace k3::launcher
