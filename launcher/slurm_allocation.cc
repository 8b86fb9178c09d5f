#include "launcher/slurm_allocation.h"

#include <fmt/format.h>
#include <poll.h>
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <iterator>
#include <utility>

#include "common/base/deadline.h"
#include "launcher/paths.h"
#include "launcher/run_program.h"

extern char** environ;

namespace k3::launcher {

namespace {

constexpr std::int64_t kSlurmAnswerMs = 20000;      // Slurm's programs try for ten seconds themselves
constexpr std::int64_t kReleaseMs = 10000;  // for salloc to cancel its job
constexpr std::int64_t kHolderTurnMs = 200;
constexpr std::int64_t kReasonMs = 3000;  // between questions what a job waits for

std::string_view next_line(std::string_view& text) {
    const std::string_view line = text.substr(0, text.find('\n'));
    text.remove_prefix(std::min(line.size() + 1, text.size()));
    return line;
}

bool is_job_id(std::string_view text) {
    return !text.empty() && text.size() < 12 &&
           text.find_first_not_of("0123456789") == std::string_view::npos;
}

/// What one of Slurm's programs prints. Errors: unavailable, cancelled.
Result<std::string> ask(const std::string& program, std::vector<std::string> words, int stop_fd) {
    ASSIGN_OR_RETURN(std::string path, slurm_program(program));
    words.insert(words.begin(), std::move(path));
    ASSIGN_OR_RETURN(ProgramRun run, run_program(words, Deadline::after_ms(kSlurmAnswerMs), stop_fd));
    if (!run.timed_out && run.ending.exit_code() == 0) return std::move(run.output);
    return Error{ErrorCode::unavailable,
                 fmt::format("{} fails: {}", program,
                             run.timed_out ? fmt::format("no answer within {} s", kSlurmAnswerMs / 1000)
                                           : slurm_complaint(run.output)),
                 "`sinfo` must work here"};
}

/// They are meant for the first srun of a job, or for what runs in a step.
void clear_variables() {
    std::vector<std::string> names;
    for (char** entry = environ; *entry != nullptr; ++entry) {
        const std::string_view text = *entry;
        const std::string_view name = text.substr(0, text.find('='));
        if (name.starts_with("SLURM_") && name != "SLURM_CONF" && name != "SLURM_CLUSTERS")
            names.emplace_back(name);
    }
    for (const std::string& name : names) ::unsetenv(name.c_str());
}

}  // namespace

Result<std::string> slurm_program(const std::string& name) {
    auto path = find_program(name, "program of Slurm");
    if (path.has_value()) return path->string();
    return Error{ErrorCode::unavailable,
                 fmt::format("--slurm needs {}, and it is not in PATH", name),
                 "run k3pipe where Slurm's client programs are (Debian: slurm-client), or leave "
                 "out --slurm"};
}

bool is_in_slurm_job() noexcept {
    const char* given = std::getenv("SLURM_JOB_ID");
    return given != nullptr && *given != '\0';
}

Result<std::vector<std::string>> cancel_words(const std::string& job_name) {
    ASSIGN_OR_RETURN(std::string program, slurm_program("scancel"));
    return std::vector<std::string>{std::move(program), "--quiet", "--name=" + job_name};
}

std::string field_of(std::string_view line, std::string_view key) {
    const std::string start = fmt::format("{}=", key);
    for (std::size_t at = 0; (at = line.find(start, at)) != std::string_view::npos; ++at) {
        if (at > 0 && line[at - 1] != ' ' && line[at - 1] != '\n') continue;
        const std::string_view value = line.substr(at + start.size());
        return std::string(value.substr(0, value.find_first_of(" \n")));
    }
    return {};
}

std::string slurm_complaint(std::string_view output) {
    constexpr std::string_view kError = "error: ";
    std::string_view found;
    std::string_view last;
    while (!output.empty()) {
        const std::string_view line = next_line(output);
        if (!line.empty() && !line.starts_with("Try ")) last = line;
        if (line.find(kError) != std::string_view::npos) found = line;
    }
    for (std::string_view program : {"salloc: ", "srun: "})
        if (last.starts_with(program)) last.remove_prefix(program.size());
    if (found.empty()) return std::string(last);
    found.remove_prefix(found.find(kError) + kError.size());
    for (std::string_view prefix : {"Job submit/allocate failed: ", "Unable to allocate resources: "})
        if (found.starts_with(prefix)) found.remove_prefix(prefix.size());
    return std::string(found);
}

std::optional<Error> end_of_job(const std::string& job, std::string_view shown) {
    const std::string state = field_of(shown, "JobState");
    const std::string reason = field_of(shown, "Reason");
    if (state == "RUNNING" || state == "SUSPENDED" || state == "CONFIGURING") return std::nullopt;
    // While its steps end a job is COMPLETING, whatever the reason.
    std::string what = "has ended, or was cancelled";
    std::string remedy = "start the pipeline again";
    if (state == "TIMEOUT" || reason == "TimeLimit") {
        what = "has reached its time limit";
        remedy = "ask for more: time in [slurm], or the --time of your own salloc or sbatch";
    } else if (state == "NODE_FAIL" || state == "BOOT_FAIL" || reason == "NodeDown" ||
               reason == "NodeFail") {
        what = "has lost a node, and Slurm ended it";
    } else if (state == "PREEMPTED") {
        what = "had to make room for another job";
    } else if (state == "CANCELLED") {
        what = "was cancelled";
    } else if (state == "OUT_OF_MEMORY") {
        what = "used more memory than it was given";
        remedy = "ask for more: mem in [slurm]";
    } else if (state == "PENDING") {
        what = "has no nodes yet";
        remedy = "wait until it has";
    }
    return Error{ErrorCode::unavailable, fmt::format("Slurm job {} {}", job, what), remedy};
}

std::vector<std::string> allocation_words(const SlurmAllocation::Request& request) {
    const SlurmSpec& spec = request.spec;
    std::vector<std::string> words = {fmt::format("--job-name={}", request.job_name),
                                      fmt::format("--nodes={}", request.n_nodes),
                                      "--ntasks-per-node=1", "--no-bell", "--wait-all-nodes=1"};
    // An expert server uses all that its box has: whole nodes, unless less is asked for.
    if (spec.cpus > 0)
        words.push_back(fmt::format("--cpus-per-task={}", spec.cpus));
    else
        words.emplace_back("--exclusive");
    if (!spec.mem.empty())
        words.push_back(fmt::format("--mem={}", spec.mem));
    else if (spec.cpus == 0)
        words.emplace_back("--mem=0");  // all of it
    for (const auto& [flag, value] :
         {std::pair<const char*, const std::string&>{"partition", spec.partition},
          {"account", spec.account},
          {"qos", spec.qos},
          {"time", spec.time}})
        if (!value.empty()) words.push_back(fmt::format("--{}={}", flag, value));
    words.insert(words.end(), spec.extra.begin(), spec.extra.end());
    return words;
}

Result<std::unique_ptr<SlurmAllocation>> SlurmAllocation::open(const Request& request,
                                                               Janitor& janitor,
                                                               const EventLog& events,
                                                               int stop_fd) {
    std::unique_ptr<SlurmAllocation> allocation(new SlurmAllocation());
    if (is_in_slurm_job()) {
        const char* given = std::getenv("SLURM_JOB_ID");
        allocation->job_ = given;
        if (!is_job_id(allocation->job_))
            return Error{ErrorCode::invalid_argument,
                         fmt::format("SLURM_JOB_ID is '{}', which is no job", given),
                         "unset it, and a job of the pipeline's own is made"};
    } else {
        allocation->job_name_ = request.job_name;
        RETURN_IF_ERROR(allocation->take(request, janitor, events, stop_fd));
    }
    clear_variables();
    RETURN_IF_ERROR(allocation->find_nodes(request));
    return allocation;
}

Status SlurmAllocation::take(const Request& request, Janitor& janitor, const EventLog& events,
                             int stop_fd) {
    ChildSpec child;
    child.name = "salloc";
    ASSIGN_OR_RETURN(const std::string program, slurm_program("salloc"));
    child.argv = {program, "--no-shell"};
    for (std::string& word : allocation_words(request)) child.argv.push_back(std::move(word));
    child.variables = environment_with({});
    ASSIGN_OR_RETURN(asking_, spawn_child(child));
    const pid_t group = asking_.pid;
    janitor.watch(group);
    Status granted = wait_for_grant(events, stop_fd);
    janitor.forget(group);
    if (!granted.has_value() && granted.error().code == ErrorCode::invalid_argument)
        return Error{ErrorCode::invalid_argument,
                     fmt::format("{}{}: Slurm makes no job: {}", request.file.string(),
                                 request.spec.line > 0 ? fmt::format(":{}", request.spec.line) : "",
                                 granted.error().message),
                     "correct [slurm]; `sinfo` shows partitions, nodes and their limits"};
    return granted;
}

Status SlurmAllocation::wait_for_grant(const EventLog& events, int stop_fd) {
    std::string said;
    std::string shown;
    Deadline next_question = Deadline::after_ms(kReasonMs / 2);
    for (;;) {
        const std::optional<Ending> ending = reap_child(asking_);
        std::array<char, 4096> buffer;
        for (ssize_t got = 0;
             (got = ::read(asking_.output.get(), buffer.data(), buffer.size())) > 0;)
            said.append(buffer.data(), static_cast<std::size_t>(got));
        // "salloc: Pending job allocation 7", and "salloc: Granted job allocation 7" in the end.
        constexpr std::string_view kNumber = " job allocation ";
        if (const std::size_t at = said.find(kNumber); at != std::string::npos) {
            std::string_view rest = std::string_view(said).substr(at + kNumber.size());
            const std::string_view line = next_line(rest);
            job_ = line.substr(0, line.find_first_not_of("0123456789"));
        }
        if (ending.has_value()) {
            if (ending->exit_code() == 0 && is_job_id(job_)) return Status::ok();
            // What it says of a job that somebody has taken from it.
            if (!job_.empty() && (said.find("error: ") == std::string::npos ||
                                  said.find("already completing") != std::string::npos))
                return Error{ErrorCode::unavailable,
                             fmt::format("Slurm job {} was cancelled while it waited for its nodes",
                                         job_),
                             "start the pipeline again"};
            return Error{ErrorCode::invalid_argument, slurm_complaint(said), ""};
        }
        if (!job_.empty() && next_question.expired()) {
            next_question = Deadline::after_ms(kReasonMs);
            auto reason = ask("squeue", {"--noheader", "--jobs=" + job_, "--format=%r"}, stop_fd);
            if (!reason.has_value() && reason.error().code == ErrorCode::cancelled)
                return reason.error();
            const std::string why = reason.has_value() ? reason->substr(0, reason->find('\n')) : "";
            if (!why.empty() && why != shown && why != "None") {
                shown = why;
                events.important(fmt::format(
                    "Slurm job {} waits for its nodes ({}); Ctrl-C cancels it", job_, why));
            }
        }
        pollfd fds[] = {{asking_.exited.get(), POLLIN, 0}, {stop_fd, POLLIN, 0}};
        ::poll(fds, std::size(fds), kHolderTurnMs);
        if ((fds[1].revents & POLLIN) != 0) return Error{ErrorCode::cancelled, "interrupted", ""};
    }
}

Status SlurmAllocation::find_nodes(const Request& request) {
    ASSIGN_OR_RETURN(const std::string shown,
                     ask("scontrol", {"show", "job", "--oneliner", job_}, -1));
    if (auto over = end_of_job(job_, shown)) return *std::move(over);
    ASSIGN_OR_RETURN(const std::string names,
                     ask("scontrol", {"show", "hostnames", field_of(shown, "NodeList")}, -1));
    for (std::string_view rest = names; !rest.empty();) {
        SlurmNode node;
        node.name = next_line(rest);
        if (node.name.empty()) continue;
        ASSIGN_OR_RETURN(const std::string facts,
                         ask("scontrol", {"show", "node", "--oneliner", node.name}, -1));
        node.address = field_of(facts, "NodeAddr");
        if (node.address.empty()) node.address = node.name;
        nodes_.push_back(std::move(node));
    }
    const auto wanted = static_cast<std::size_t>(request.spec.nodes);
    if (nodes_.empty() || nodes_.size() < wanted)
        return Error{ErrorCode::invalid_argument,
                     fmt::format("Slurm job {} has {} node{}, and [slurm] in {} asks for {}", job_,
                                 nodes_.size(), nodes_.size() == 1 ? "" : "s",
                                 request.file.string(), wanted),
                     "make a larger job, or lower nodes in [slurm]"};
    return Status::ok();
}

SlurmAllocation::~SlurmAllocation() {
    if (job_name_.empty()) return;
    if (asking_.pid > 0) {
        ::kill(asking_.pid, SIGTERM);  // it cancels its job, if it has one
        const Deadline deadline = Deadline::after_ms(kReleaseMs);
        while (!reap_child(asking_).has_value()) {
            if (deadline.expired()) ::kill(-asking_.pid, SIGKILL);
            pollfd ended = {asking_.exited.get(), POLLIN, 0};
            ::poll(&ended, 1, kHolderTurnMs);
        }
    }
    if (auto words = cancel_words(job_name_); words.has_value()) {
        [[maybe_unused]] auto cancelled = run_program(*words, Deadline::after_ms(kReleaseMs));
    }
}

}  // namespace k3::launcher
