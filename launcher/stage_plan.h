#pragma once
// From the pipeline file to exact command lines: every process, its endpoint, its arguments.

#include <cstdint>
#include <filesystem>
#include <string>
#include <utility>
#include <vector>

#include "common/base/result.h"
#include "launcher/pipeline_file.h"

namespace k3::launcher {

/// One stage as the supervisor and `k3pipe plan` see it.
struct StagePlan {
    msg::ServiceKind kind = msg::ServiceKind::unknown;
    std::string name;
    std::string where;              // its table, "file:line"; empty if there is none
    std::string endpoint;           // where it answers
    bool owned = true;              // false: it runs already, only watched
    std::vector<std::string> argv;  // wrapper included; argv[0] is an absolute path on this box
    std::string host;               // where it is started; empty: this box
    std::string client;             // by which program it is started there: "ssh", "srun"
    std::size_t n_wrap = 0;         // words of the wrapper in argv
    bool own_sessions = false;      // its box knows where saved sessions lie there
    std::vector<std::pair<std::string, std::string>> env;
    BoxFigures box;
    std::filesystem::path model;  // its checkpoint, on its box; empty for stages without one
    std::vector<ServiceSetting> settings;  // as its flags say, defaults not included
    std::filesystem::path keys;  // key file, in argv if it runs here; empty: it needs none
    bool wrapped = false;
    bool terminal = false;
    RestartPolicy restart = RestartPolicy::on_failure;
};

struct PipelinePlan {
    std::string name;
    std::filesystem::path model;
    std::filesystem::path keys;       // key file of its stages on tcp; empty: none of them has keys
    std::filesystem::path placement;  // empty: none
    std::filesystem::path run_directory;
    std::uint64_t run_id = 0;
    std::vector<StagePlan> stages;

    bool has_remote() const noexcept;
    /// Without the stages of other boxes, whose memory and files cannot be seen from here.
    PipelinePlan on_this_box() const;
    /// With the stages of other boxes as if they ran here, from the checkpoint `model`: for what
    /// does not depend on the box, such as the shape of a budget.
    PipelinePlan as_if_here(const std::filesystem::path& model) const;
    const StagePlan& gateway() const noexcept;
    std::size_t n_owned() const noexcept;
};

/// Resolves programs, models, endpoints, layer ranges and the key file. Starts and creates nothing.
/// Trunk tables without `layers` share the model's layers evenly, in the order of the file.
/// A stage that another box has to reach binds tcp, at its own box's address and the port
/// port_base + its place in the list; every other one a socket in the run directory. Addresses of
/// boxes are there already (hosts.h).
/// Errors: invalid_argument (a program is missing, a socket path is too long, no model is named,
/// only some trunk stages have layers, other boxes can reach a stage that has neither keys nor
/// `insecure`), and those of reading the model's config.
Result<PipelinePlan> make_plan(const PipelineSpec& spec, const std::filesystem::path& run_directory,
                               std::uint64_t run_id);

/// Longest path an ipc socket can have here: sizeof(sockaddr_un::sun_path) - 1.
inline constexpr std::size_t kMaxSocketPath = 107;

}  // namespace k3::launcher
