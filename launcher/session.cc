#include "launcher/session.h"

#include <fmt/format.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <ctime>
#include <random>

#include "common/base/memory.h"
#include "common/model/placement_file.h"
#include "common/storage/file.h"
#include "common/transport/arena.h"
#include "launcher/host_setup.h"
#include "launcher/host_starter.h"
#include "launcher/hosts.h"
#include "launcher/settings_check.h"
#include "launcher/slurm_placement.h"
#include "launcher/slurm_remote.h"
#include "launcher/ssh_remote.h"
#include "launcher/stage_plan.h"
#include "launcher/words.h"

namespace k3::launcher {

std::uint64_t new_run_id() {
    std::random_device device;
    std::uint64_t id = (static_cast<std::uint64_t>(device()) << 32U) | device();
    return id | (1ULL << 63U);  // so that every run id has the same number of digits
}

namespace {

/// A local pipeline starts with 100 and cannot with 64. Each open shard of a checkpoint is one
/// more, and the released one has 96.
constexpr rlim_t kLeastFiles = 128;
constexpr rlim_t kWantedFiles = 1024;

/// Raises a lower limit as far as it may go; the services inherit it.
Status raise_file_limit() {
    rlimit limit = {};
    if (::getrlimit(RLIMIT_NOFILE, &limit) != 0 || limit.rlim_cur >= kWantedFiles)
        return Status::ok();
    const rlim_t most = limit.rlim_max;
    limit.rlim_cur = std::min(most, kWantedFiles);
    ::setrlimit(RLIMIT_NOFILE, &limit);
    if (most >= kLeastFiles) return Status::ok();
    return Error{
        ErrorCode::resource_exhausted,
        fmt::format("the limit of open files is {}, and a pipeline needs {}", most, kLeastFiles),
        "raise it (ulimit -n)"};
}

Status set_session_directory(PipelineSpec& spec, const std::string& path, bool slurm) {
    for (StageSpec& stage : spec.stages) {
        if (stage.kind != msg::ServiceKind::trunk || stage.attached()) continue;
        if (slurm || !stage.host.empty())
            return Error{ErrorCode::unsupported,
                         fmt::format("{} writes sessions where it runs, on {}, and not into {}",
                                     stage.name, stage.host.empty() ? "a node" : stage.host, path),
                         "start the pipeline with k3pipe up, and name the session with --attach"};
        // The folder is the user's: nothing in it is removed for a limit.
        std::erase_if(stage.settings, [](const ServiceSetting& s) {
            return s.name == "session_dir" || s.name == "session_dir_bytes";
        });
        stage.settings.push_back({"session_dir", {path}});
    }
    return Status::ok();
}

/// What other boxes take their shares from. A server looks closer: it knows the checkpoint.
Result<std::string> placement_to_hand_over(const PipelinePlan& plan) {
    if (!plan.has_remote() || plan.placement.empty()) return std::string();
    ASSIGN_OR_RETURN(std::string text,
                     storage::read_text_file(plan.placement, model::kMaxPlacementBytes));
    if (text.starts_with(model::kPlacementMagic)) return text;
    return Error{ErrorCode::corrupt,
                 fmt::format("placement {} is no file of k3pipe placement: it does not begin with "
                             "'{}'",
                             plan.placement.string(), model::kPlacementMagic),
                 "make it with k3pipe placement --out, and name it in [pipeline]"};
}

}  // namespace

Result<std::unique_ptr<Session>> Session::open(const Options& options, const EventLog& events) {
    ASSIGN_OR_RETURN(PipelineSpec spec, load_pipeline(options.config));
    if (!options.name.empty() && !is_legal_name(options.name))
        return Error{ErrorCode::invalid_argument,
                     fmt::format("'{}' is not a legal pipeline name", options.name),
                     "use letters, digits, - and _, at most 40"};
    if (!options.name.empty()) spec.name = options.name;
    if (!options.session_dir.empty())
        RETURN_IF_ERROR(set_session_directory(spec, options.session_dir.string(), options.slurm));
    std::unique_ptr<Session> session(new Session());
    RETURN_IF_ERROR(session->open_parts(options, std::move(spec), events));
    return session;
}

std::string Session::job_name() const {
    return fmt::format("k3pipe-{}-{}", record_.name, record_.run_id);
}

Status Session::allocate(PipelineSpec* spec, std::size_t n_nodes, const EventLog& events) {
    ASSIGN_OR_RETURN(
        allocation_,
        SlurmAllocation::open(
            {.spec = spec->slurm, .job_name = job_name(), .n_nodes = n_nodes, .file = spec->file},
            *janitor_, events, signals_.fd()));
    RETURN_IF_ERROR(place_on_nodes(spec, *allocation_));
    std::string places;
    for (const SlurmNode& node : allocation_->nodes()) {
        std::string stages;
        for (const StageSpec& stage : spec->stages)
            if (stage.host == node.name) stages += " " + stage.name;
        if (!stages.empty()) places += fmt::format("; {}:{}", node.name, stages);
    }
    events.important(fmt::format("Slurm job {}{}", allocation_->job(), places));
    return Status::ok();
}

Result<std::shared_ptr<Remote>> Session::make_remote(const PipelineSpec& spec) const {
    if (allocation_ == nullptr) return std::shared_ptr<Remote>(make_ssh_remote(spec.ssh));
    ASSIGN_OR_RETURN(std::string srun, slurm_program("srun"));
    ASSIGN_OR_RETURN(std::string scontrol, slurm_program("scontrol"));
    return std::shared_ptr<Remote>(
        make_slurm_remote(std::move(srun), std::move(scontrol), allocation_->job()));
}

Status Session::open_parts(const Options& options, PipelineSpec spec, const EventLog& events) {
    RETURN_IF_ERROR(check_address_space(kLauncherAddressSpace));
    RETURN_IF_ERROR(raise_file_limit());
    std::string name = spec.name;
    if (options.unique_name) name += fmt::format("-{}", ::getpid());
    std::filesystem::path base = run_base(options.run_dir.empty() ? spec.run_dir : options.run_dir);
    run_id_ = new_run_id();
    // Planned before anything is made: most mistakes in a file end here.
    std::size_t n_nodes = 0;
    PipelinePlan plan;
    if (options.slurm) {
        ASSIGN_OR_RETURN(n_nodes, nodes_for(spec));
        ASSIGN_OR_RETURN(plan, make_plan(placed_somewhere(spec, n_nodes), base / name, run_id_));
    } else {
        RETURN_IF_ERROR(resolve_addresses(&spec));
        ASSIGN_OR_RETURN(plan, make_plan(spec, base / name, run_id_));
    }
    if (!plan.keys.empty()) {
        ASSIGN_OR_RETURN(keys_, transport::CurveKeys::load(plan.keys.string()));
    }
    // From here on a Ctrl-C waits until the supervisor reads it, so nothing is left half made.
    ASSIGN_OR_RETURN(signals_, StopSignals::take());
    RETURN_IF_ERROR(check_settings(plan, signals_.fd()));
    ASSIGN_OR_RETURN(directory_, RunDirectory::acquire(base, name));
    for (const std::string& dead : sweep_dead_runs(base))
        events.normal(fmt::format("swept the run directory of {}, which is dead", dead));
    for (const std::string& segment : transport::sweep_dead_segments())
        events.normal(fmt::format("swept the shared-memory segment {} of a dead process", segment));
    record_.name = name;
    record_.pid = ::getpid();
    record_.run_id = fmt::format("{:x}", run_id_);
    record_.file = spec.file.string();
    record_.started_unix_s = std::time(nullptr);
    record_.gateway = plan.gateway().endpoint;
    record_.keys = plan.keys.string();
    if (keys_ != nullptr) record_.keys_fingerprint = keys_->fingerprint();
    record_.state = "starting";
    RETURN_IF_ERROR(directory_->write(record_));
    Janitor::Options janitor = {.run_directory = directory_->path(), .run_id = run_id_};
    if (options.slurm && !is_in_slurm_job()) {
        ASSIGN_OR_RETURN(janitor.last_command, cancel_words(job_name()));
    }
    ASSIGN_OR_RETURN(janitor_, Janitor::start(janitor, directory_->lock_fd()));
    if (options.slurm) {
        RETURN_IF_ERROR(allocate(&spec, n_nodes, events));
        RETURN_IF_ERROR(resolve_addresses(&spec));
        ASSIGN_OR_RETURN(plan, make_plan(spec, base / name, run_id_));
        record_.gateway = plan.gateway().endpoint;
    }
    plan.name = name;
    ASSIGN_OR_RETURN(std::string placement, placement_to_hand_over(plan));
    ASSIGN_OR_RETURN(std::shared_ptr<Remote> remote, make_remote(spec));
    HostSetup hosts = prepare_hosts(spec, *remote, plan, events, signals_.fd());
    if (!hosts.faults.empty()) return combined(hosts.faults, events);
    ASSIGN_OR_RETURN(starter_, make_local_starter());
    if (plan.has_remote())
        starter_ =
            make_host_starter(std::move(starter_), {.remote = std::move(remote),
                                                    .host_stage = std::move(hosts.host_stage),
                                                    .pipeline = name,
                                                    .run_id = run_id_,
                                                    .keys = keys_,
                                                    .placement = plan.placement,
                                                    .placement_text = std::move(placement)});
    announce(plan, events);
    SupervisorOptions supervise;
    supervise.start_timeout_ms = spec.start_timeout_s * 1000;
    supervise.attach_timeout_ms = spec.attach_timeout_ms;
    supervise.max_restarts = static_cast<std::size_t>(spec.max_restarts);
    supervise.restart_window_ms = spec.restart_window_s * 1000;
    supervise.forward_errors = options.forward_errors;
    supervise.keys = keys_;
    supervise.signal_fd = signals_.fd();
    auto on_change = [this, &events](const std::string& state,
                                     const std::vector<StageRecord>& stages) {
        record_.state = state;
        record_.stages = stages;
        if (Status wrote = directory_->write(record_); !wrote.has_value())
            events.important(wrote.error().sentence());
    };
    ASSIGN_OR_RETURN(supervisor_, Supervisor::create(std::move(plan), supervise, *starter_,
                                                     janitor_.get(), events, on_change));
    return Status::ok();
}

void Session::announce(const PipelinePlan& plan, const EventLog& events) const {
    std::size_t attached = plan.stages.size() - plan.n_owned();
    events.important(fmt::format("starting pipeline '{}': {} process{}{}{}", plan.name,
                                 plan.n_owned(), plan.n_owned() == 1 ? "" : "es",
                                 attached == 0 ? "" : fmt::format(" and {} attached", attached),
                                 plan.model.empty() ? "" : ", model " + plan.model.string()));
}

Session::~Session() {
    supervisor_.reset();  // joins its threads
    starter_.reset();     // closes the lifeline
    allocation_.reset();  // nothing runs in it any more
    // Segments of services that had to be killed; their owners are gone.
    if (directory_ != nullptr) remove_segments(run_id_);
    directory_.reset();
    janitor_.reset();
}

}  // namespace k3::launcher
