#include "launcher/host_setup.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/utsname.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <iterator>
#include <set>
#include <span>
#include <string_view>
#include <thread>
#include <utility>

#include "common/base/settings.h"
#include "common/pack/format.h"
#include "launcher/digest_job.h"
#include "launcher/endpoint_probe.h"
#include "launcher/host_protocol.h"
#include "launcher/paths.h"
#include "launcher/run_program.h"
#include "launcher/words.h"

namespace k3::launcher {

namespace fs = std::filesystem;

namespace {

constexpr std::int64_t kCheckMs = 20000;
constexpr std::int64_t kShipMs = 1800000;  // 150 MB over 1 Mbit/s
constexpr std::int64_t kPortProbeMs = 500;
constexpr std::size_t kShownLibraries = 5;
constexpr std::string_view kMark = "k3pipe: ";  // in front of each line that is ours

/// Programs of this build that a box needs, as they travel.
struct Shipment {
    struct File {
        std::string name;
        fs::path path;
        std::uintmax_t bytes = 0;
        std::string sha256;
    };
    std::vector<File> files;  // by name
    std::string folder;       // below the cache of the box
    std::uintmax_t bytes = 0;
};

constexpr const char* kOurselves = "/proc/self/exe";  // also when a new build took our place

/// Where a program of ours lies here.
std::string place_of(const Shipment::File& file) {
    std::error_code unreadable;
    return file.path == kOurselves ? fs::read_symlink(file.path, unreadable).string()
                                   : file.path.string();
}

Result<std::string> sha256_of(const fs::path& path, std::uintmax_t bytes) {
    DigestJob job;
    job.kind = DigestKind::sha256;
    job.files = {path};
    job.n_threads = 1;
    add_parts(job.parts, 0, bytes, bytes);
    ASSIGN_OR_RETURN(Digests digests, run_digests(job, [](auto, auto) { return true; }));
    if (digests.parts.front().error.has_value()) return *std::move(digests.parts.front().error);
    return std::move(digests.parts.front().hex);
}

/// `programs`: "k3pipe", "k3-experts". The folder's name is a digest of names and contents.
Result<Shipment> make_shipment(const std::set<std::string>& programs) {
    Shipment shipment;
    std::string sums;
    for (const std::string& name : programs) {
        fs::path path = kOurselves;
        if (name != "k3pipe") {
            ASSIGN_OR_RETURN(path, find_program(name, "program to copy"));
        }
        std::error_code code;
        const std::uintmax_t bytes = fs::file_size(path, code);
        if (code)
            return Error{ErrorCode::io,
                         fmt::format("cannot read {}: {}", path.string(), code.message()),
                         "build or install it again"};
        ASSIGN_OR_RETURN(std::string sha256, sha256_of(path, bytes));
        sums += name + sha256;
        shipment.bytes += bytes;
        shipment.files.push_back({name, std::move(path), bytes, std::move(sha256)});
    }
    shipment.folder = "build-" + xxh3_hex(pack::format::hash(std::as_bytes(std::span(sums))));
    return shipment;
}

Result<std::vector<Fd>> open_files(const Shipment& shipment) {
    std::vector<Fd> files;
    for (const Shipment::File& file : shipment.files) {
        files.emplace_back(::open(file.path.c_str(), O_RDONLY | O_CLOEXEC));
        if (!files.back().valid())
            return Error{
                ErrorCode::io,
                fmt::format("cannot read {}: {}", file.path.string(), std::strerror(errno)),
                "build or install it again"};
    }
    return files;
}

constexpr std::string_view kCacheFolder = "c=\"${XDG_CACHE_HOME:-$HOME/.cache}/k3pipe\"\n";

/// Receives the programs on standard input. They get their place only when all are right, so a
/// connection that breaks leaves nothing. Copies that nobody has used for a month go, and what a
/// box without power could not tidy up.
std::string ship_script(const Shipment& shipment) {
    std::string script = fmt::format(
        "set -e\numask 077\n{}mkdir -p \"$c\"\nfind \"$c\" -mindepth 1 -maxdepth 1 -type d "
        "\\( -name 'build-*' -mtime +30 -o -name '.new-*' -mtime +1 \\) -exec rm -rf {{}} "
        "+\nt=$(mktemp -d \"$c/.new-XXXXXX\")\n"
        "trap 'rm -rf \"$t\"' EXIT\ntrap 'exit 1' HUP TERM INT\ncd \"$t\"\n",
        kCacheFolder);
    std::string sums;
    for (const Shipment::File& file : shipment.files) {
        script += fmt::format("head -c {} > {}\n", file.bytes, file.name);
        sums += fmt::format("{}  {}\n", file.sha256, file.name);
    }
    script += fmt::format("sha256sum -c --quiet <<'END'\n{}END\nchmod 755 k3*\n", sums);
    script += fmt::format("mv -T \"$t\" \"$c/{0}\" 2>/dev/null || test -x \"$c/{0}/k3pipe\"\n",
                          shipment.folder);
    return script;
}

/// Sets p, the k3pipe of the box.
std::string program_script(const HostSpec& host, const Shipment& shipment) {
    if (!host.binary.empty())
        return fmt::format("p=$(command -v {} || true)\n", shell_line({host.binary}));
    std::string script = fmt::format("{}p=\"$c/{}/k3pipe\"\n", kCacheFolder, shipment.folder);
    if (!host.shared_files) return script;
    std::string ours;
    script += "if sha256sum -c --status 2>/dev/null <<'END'\n";
    for (const Shipment::File& file : shipment.files) {
        script += fmt::format("{}  {}\n", file.sha256, place_of(file));
        if (file.name == "k3pipe") ours = place_of(file);
    }
    return script + fmt::format("END\nthen p={}\nfi\n", shell_line({ours}));
}

std::string check_script(const HostSpec& host, const Shipment& shipment,
                         const std::set<std::string>& models) {
    std::string script = program_script(host, shipment);
    script += fmt::format("echo \"{}machine $(uname -m)\"\n", kMark);
    for (const std::string& model : models) {
        const std::string config = shell_line({model + "/config.json"});
        script += fmt::format("test -r {} || echo {}\n", config,
                              shell_line({fmt::format("{}no-model {}", kMark, model)}));
    }
    if (!host.binary.empty())
        script += fmt::format("test -x \"$p\" || {{ test -e {0} && echo '{1}not-executable'; }}\n",
                              shell_line({host.binary}), kMark);
    script += "test -x \"$p\" || exit 0\n";
    if (!host.binary.empty())
        script += fmt::format(
            "echo \"{}version $(timeout 5 \"$p\" --version 2>/dev/null </dev/null | head -n 1)\"\n",
            kMark);
    script += fmt::format(
        "echo \"{0}program $p\"\nd=$(dirname \"$p\")\n"
        "ldd \"$p\" \"$d\"/k3-* 2>&1 | grep 'not found' | sort -u | sed 's/^/{0}library /'\n",
        kMark);
    // Its age is the time since it was used (ship_script()).
    if (host.binary.empty()) script += "case \"$d\" in \"$c\"/*) touch \"$d\" ;; esac\n";
    script += "exit 0\n";
    return script;
}

/// One box, on a thread of its own.
class HostTask {
  public:
    HostTask(const Remote& remote, const HostSpec& host, const PipelinePlan& plan,
             const EventLog& events, int stop_fd)
        : remote_(remote), host_(host), events_(events), stop_fd_(stop_fd) {
        for (const StagePlan& stage : plan.stages) {
            if (stage.host != host.name) continue;
            if (!stage.model.empty()) models_.insert(stage.model.string());
            const std::string& program = stage.argv.at(stage.n_wrap);
            if (program.find('/') == std::string::npos) programs_.insert(program);
            endpoints_.emplace_back(stage.name, stage.endpoint);
        }
    }

    void run() {
        if (Status done = prepare(); !done.has_value()) faults_.push_back(std::move(done).error());
    }

    std::string host_stage() const { return "exec " + shell_line({program_, "host-stage"}); }
    const std::string& name() const noexcept { return host_.name; }
    std::vector<Error>& faults() noexcept { return faults_; }

  private:
    Result<std::string> execute(const std::string& script, std::int64_t ms,
                                const std::vector<Fd>& input = {}) {
        ASSIGN_OR_RETURN(ProgramRun run, run_program(remote_.command(host_.name, script),
                                                     Deadline::after_ms(ms), stop_fd_, input));
        if (run.timed_out)
            return Error{ErrorCode::deadline_exceeded,
                         fmt::format("host {} did not answer within {} s", host_.name, ms / 1000),
                         fmt::format("try `{}`", remote_.by_hand(host_.name))};
        if (auto fault = remote_.fault(host_.name, run)) return *std::move(fault);
        if (run.ending.exit_code() != 0)
            return Error{ErrorCode::io,
                         fmt::format("host {}: {} ({})", host_.name, last_line(run.output),
                                     run.ending.text()),
                         "correct this on that box"};
        return std::move(run.output);
    }

    Result<HostReport> check() {
        ASSIGN_OR_RETURN(const std::string output,
                         execute(check_script(host_, shipment_, models_), kCheckMs));
        return parse_report(output);
    }

    Status prepare() {
        if (host_.binary.empty()) {
            programs_.insert("k3pipe");
            ASSIGN_OR_RETURN(shipment_, make_shipment(programs_));
        }
        ASSIGN_OR_RETURN(HostReport report, check());
        for (const std::string& model : report.no_models)
            faults_.push_back(
                {ErrorCode::not_found,
                 fmt::format("host {}: {} has no config.json that can be read", host_.name, model),
                 fmt::format("copy the checkpoint there, or set model in "
                             "[hosts.\"{}\"] to where it is",
                             host_.name)});
        check_ports();
        if (report.program.empty()) {
            RETURN_IF_ERROR(ship(report));
            ASSIGN_OR_RETURN(report, check());
        }
        program_ = report.program;
        if (report.libraries.empty())
            return host_.binary.empty() ? Status::ok() : check_version(report);
        report.libraries.resize(std::min(report.libraries.size(), kShownLibraries));
        return Error{ErrorCode::incompatible,
                     fmt::format("host {} lacks what our programs need: {}", host_.name,
                                 fmt::join(report.libraries, ", ")),
                     "install the packages of these libraries there, or a k3pipe of its own that "
                     "binary in [hosts] names"};
    }

    /// One exit code for everything that can be wrong with it.
    Error wrong_binary(std::string_view why) const {
        return {
            ErrorCode::invalid_argument,
            fmt::format("host {}: binary {} {}", host_.name, host_.binary, why),
            fmt::format("correct binary in [hosts.\"{}\"], or leave it out: ours is copied then",
                        host_.name)};
    }

    Status check_version(const HostReport& report) const {
        const std::string ours = fmt::format("k3pipe {}", version());
        if (report.version == ours) return Status::ok();
        if (!report.version.starts_with("k3pipe ")) return wrong_binary("is no k3pipe");
        return wrong_binary(fmt::format("is {}, and this one {}", report.version, ours));
    }

    /// A connection from here is what its callers will make: what it meets now is another's.
    void check_ports() {
        for (const auto& [stage, endpoint] : endpoints_)
            if (probe_endpoint(endpoint, kPortProbeMs).finding == EndpointProbe::Finding::listening)
                faults_.push_back({ErrorCode::resource_exhausted,
                                   fmt::format("host {}: {}, the endpoint of {}, is taken by "
                                               "another process",
                                               host_.name, endpoint, stage),
                                   "stop that process, or set port_base in [pipeline]"});
    }

    Status ship(const HostReport& report) {
        if (!host_.binary.empty())
            return wrong_binary(report.is_not_executable ? "cannot be executed" : "does not exist");
        utsname here = {};
        ::uname(&here);
        if (report.machine != here.machine)
            return Error{ErrorCode::incompatible,
                         fmt::format("host {} is {}, and this build is for {}", host_.name,
                                     report.machine, here.machine),
                         "install k3pipe there, and name it with binary in [hosts]"};
        events_.important(fmt::format("copying {} programs, {} MB, to {}", shipment_.files.size(),
                                      shipment_.bytes / 1000000, host_.name));
        ASSIGN_OR_RETURN(const std::vector<Fd> files, open_files(shipment_));
        ASSIGN_OR_RETURN([[maybe_unused]] const std::string said,
                         execute(ship_script(shipment_), kShipMs, files));
        return Status::ok();
    }

    /// Of what the script said.
    std::string last_line(std::string_view text) const {
        std::string_view line;
        do {
            while (text.ends_with('\n') || text.ends_with('\r')) text.remove_suffix(1);
            line = text.substr(text.rfind('\n') + 1);
            text.remove_suffix(line.size());
        } while (!text.empty() && remote_.is_own_line(line));
        return std::string(line);
    }

    const Remote& remote_;
    const HostSpec& host_;
    const EventLog& events_;
    const int stop_fd_;
    std::set<std::string> models_;
    std::set<std::string> programs_;
    std::vector<std::pair<std::string, std::string>> endpoints_;  // stage and where it answers
    Shipment shipment_;
    std::string program_;  // k3pipe there
    std::vector<Error> faults_;
};

}  // namespace

HostSetup prepare_hosts(const PipelineSpec& spec, const Remote& remote, const PipelinePlan& plan,
                        const EventLog& events, int stop_fd) {
    std::vector<HostTask> tasks;
    for (const HostSpec& host : spec.hosts)
        if (std::any_of(plan.stages.begin(), plan.stages.end(),
                        [&host](const StagePlan& stage) { return stage.host == host.name; }))
            tasks.emplace_back(remote, host, plan, events, stop_fd);
    std::vector<std::thread> threads;
    for (HostTask& task : tasks) threads.emplace_back([&task] { task.run(); });
    for (std::thread& thread : threads) thread.join();
    HostSetup setup;
    for (HostTask& task : tasks) {
        setup.host_stage[task.name()] = task.host_stage();
        std::move(task.faults().begin(), task.faults().end(), std::back_inserter(setup.faults));
    }
    return setup;
}

Error combined(const std::vector<Error>& faults, const EventLog& events) {
    for (const Error& fault : faults)
        if (faults.size() == 1 || fault.code == ErrorCode::cancelled) return fault;
    for (const Error& fault : faults) events.important(fault.sentence());
    return {faults.front().code,
            fmt::format("{} things keep other boxes from starting their stages, and nothing was "
                        "started",
                        faults.size()),
            "correct what the lines above name"};
}

HostReport parse_report(const std::string& output) {
    HostReport report;
    std::string_view rest = output;
    while (!rest.empty()) {
        std::string_view line = rest.substr(0, rest.find('\n'));
        rest.remove_prefix(std::min(line.size() + 1, rest.size()));
        if (!line.starts_with(kMark)) continue;
        line.remove_prefix(kMark.size());
        const std::string_view what = line.substr(0, line.find(' '));
        std::string_view value = line.substr(std::min(what.size() + 1, line.size()));
        while (value.starts_with('\t') || value.starts_with(' ')) value.remove_prefix(1);
        if (what == "machine") report.machine = value;
        if (what == "program") report.program = value;
        if (what == "not-executable") report.is_not_executable = true;
        if (what == "version") report.version = value;
        if (what == "library") report.libraries.emplace_back(value);
        if (what == "no-model") report.no_models.emplace_back(value);
    }
    return report;
}

}  // namespace k3::launcher
