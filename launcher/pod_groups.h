#pragma once
// Which stages of a pipeline share a pod, and which pods a stateful set, in a cluster.

#include <cstddef>
#include <string>
#include <string_view>
#include <vector>

#include "launcher/pipeline_file.h"

namespace k3::launcher {

/// The pods of one stateful set.
struct PodGroup {
    std::string name;                 // of what is in it: "experts", "trunk-0", "gateway"
    std::vector<std::size_t> stages;  // places in PipelineSpec::stages
    // One stage in each pod, which differ in nothing but their number, the first of them being
    // `first_ordinal`; else all in one pod.
    bool is_numbered = false;
    std::size_t first_ordinal = 0;
};

/// Alike expert servers that follow one another share a set; each trunk stage has its own, and the
/// last one, which makes the logits, shares its pod with those who use them. That group is the
/// last.
std::vector<PodGroup> make_pod_groups(const PipelineSpec& spec);

/// The share of server `name`, which has this number, with `variable` for the number.
std::string numbered_share(const std::string& share, const std::string& name, std::size_t number,
                           std::string_view variable);

/// "My_pipe" -> "my-pipe": letters of host names.
std::string dns_name(std::string_view name);

}  // namespace k3::launcher
