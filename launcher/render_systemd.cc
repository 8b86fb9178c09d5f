// render_systemd of render.h.

#include <fmt/format.h>
#include <pwd.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <iterator>
#include <set>

#include "common/base/cores.h"
#include "launcher/hosts.h"
#include "launcher/render.h"
#include "launcher/settings_check.h"
#include "launcher/stage_weights.h"

namespace k3::launcher {

namespace fs = std::filesystem;
using msg::ServiceKind;

namespace {

constexpr const char* kCredential = "k3pipe.keys";
constexpr const char* kHere = "this-box";  // its folder, if there are others

/// A word as systemd.service(5) reads it: quotes, specifiers and, in commands, variables.
std::string quoted(std::string_view word, bool in_command) {
    std::string out = "\"";
    for (char c : word) {
        if (c == '"' || c == '\\')
            out += fmt::format("\\{}", c);
        else if (c == '%' || (c == '$' && in_command))
            out += fmt::format("{}{}", c, c);
        else if (static_cast<unsigned char>(c) < 0x20 || c == 0x7F)
            out += fmt::format("\\x{:02x}", static_cast<unsigned char>(c));
        else
            out += c;
    }
    return out + "\"";
}

/// Quoted only if it has to be: these files are for people, too.
std::string word_of(std::string_view word, bool in_command) {
    const bool is_plain = !word.empty() && std::ranges::all_of(word, [](char c) {
        return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') ||
               std::string_view("-_./:=,@+[]#").find(c) != std::string_view::npos;
    });
    return is_plain ? std::string(word) : quoted(word, in_command);
}

/// Text of a Description.
std::string plain(std::string_view text) {
    std::string out;
    for (char c : text) out += c == '%' ? "%%" : std::string(1, c);
    return out;
}

class SystemdRenderer {
  public:
    SystemdRenderer(const RenderCommand& command, const PipelineSpec& spec,
                    const PipelinePlan& plan, const std::map<std::string, StageBudget>& budgets)
        : command_(command), spec_(spec), plan_(plan), budgets_(budgets) {}

    Result<std::vector<RenderedFile>> run() {
        std::vector<RenderedFile> files;
        std::vector<std::string> boxes;
        for (const StagePlan& stage : plan_.stages)
            if (stage.owned && std::ranges::find(boxes, stage.host) == boxes.end())
                boxes.push_back(stage.host);
        for (const std::string& box : boxes) {
            ASSIGN_OR_RETURN(const fs::path folder, folder_of(box));
            files.push_back({folder / target(), target_text(box)});
            for (const StagePlan& stage : plan_.stages) {
                if (!stage.owned || stage.host != box) continue;
                ASSIGN_OR_RETURN(std::string text, unit_text(stage));
                files.push_back({folder / unit(stage), std::move(text)});
            }
        }
        return files;
    }

  private:
    std::string target() const { return fmt::format("k3pipe-{}.target", plan_.name); }
    std::string unit(const StagePlan& stage) const {
        return fmt::format("k3pipe-{}-{}.service", plan_.name, stage.name);
    }

    /// Of a box; none if there is one box only.
    Result<fs::path> folder_of(const std::string& box) const {
        if (!plan_.has_remote()) return fs::path();
        if (box.empty()) return fs::path(kHere);
        if (box.find('/') == std::string::npos && box != kHere && box != "..") return fs::path(box);
        return Error{ErrorCode::invalid_argument,
                     fmt::format("{}: host '{}' cannot be the name of a folder for its units",
                                 spec_.file.string(), box),
                     "give it an alias in ssh's settings"};
    }

    std::string head(const std::string& box) const {
        std::string text =
            fmt::format("{} systemd from {}\n", kRenderedMagic, spec_.file.filename().string());
        if (!box.empty()) fmt::format_to(std::back_inserter(text), "# For the box {}.\n", box);
        return text;
    }

    std::string target_text(const std::string& box) const {
        std::string units;
        for (const StagePlan& stage : plan_.stages)
            if (stage.owned && stage.host == box) units += " " + unit(stage);
        return fmt::format(
            "{}\n[Unit]\nDescription=k3pipe pipeline {}\nWants={}\nAfter={}\n\n"
            "[Install]\nWantedBy={}\n",
            head(box), plan_.name, units.substr(1), units.substr(1),
            command_.user_units ? "default.target" : "multi-user.target");
    }

    /// Stages on the same box that are started before it and stopped after it: the order in which
    /// the launcher stops them, so that nobody misses a service that was stopped on purpose.
    std::vector<std::string> before(const StagePlan& stage) const {
        std::vector<std::string> units;
        for (const StagePlan& other : plan_.stages) {
            const bool is_called =
                stage.kind == ServiceKind::gateway
                    ? other.kind != ServiceKind::gateway
                    : stage.kind == ServiceKind::trunk && other.kind == ServiceKind::experts;
            if (is_called && other.owned && other.host == stage.host) units.push_back(unit(other));
        }
        return units;
    }

    bool is_ours(const StagePlan& stage) const {
        return std::ranges::find(spec_.stages, stage.name, &StageSpec::name)->binary.empty();
    }

    Result<StagePlan> placed(const StagePlan& given) const {
        StagePlan stage = given;
        const auto host = std::ranges::find(spec_.hosts, stage.host, &HostSpec::name);
        fs::path folder = command_.programs;
        if (folder.empty() && !stage.host.empty()) folder = fs::path(host->binary).parent_path();
        place_program(folder, is_ours(stage), &stage);
        if (is_ours(stage) && !stage.argv[stage.n_wrap].starts_with('/'))
            return Error{ErrorCode::invalid_argument,
                         fmt::format("{}: nobody says where the programs of {} lie on {}",
                                     spec_.file.string(), stage.name, stage.host),
                         fmt::format("install k3pipe there and give its path as binary in "
                                     "[hosts.\"{}\"], or the folder with --programs",
                                     stage.host)};
        return stage;
    }

    std::string command_line(const StagePlan& stage) const {
        std::string line;
        for (std::size_t i = 0; i < stage.argv.size(); ++i) {
            const bool is_keys = i > stage.n_wrap && stage.argv[i - 1] == "--keys";
            line += i == 0 ? "" : stage.argv[i].starts_with("--") ? " \\\n    " : " ";
            line += is_keys ? fmt::format("%d/{}", kCredential) : word_of(stage.argv[i], true);
        }
        // Another box is handed its keys by ssh; here it has a file of its own.
        if (!stage.keys.empty() && !stage.host.empty())
            line += fmt::format(" \\\n    --keys %d/{}", kCredential);
        return line;
    }

    std::string credential(const StagePlan& stage) const {
        if (stage.keys.empty()) return "";
        const std::string path = stage.host.empty()
                                     ? stage.keys.string()
                                     : fmt::format("/etc/k3pipe/{}.keys", plan_.name);
        std::string text = fmt::format("LoadCredential={}:{}\n", kCredential, plain(path));
        if (stage.host.empty()) return text;
        return fmt::format("# Copy {} there (scp -p).\n{}", plan_.keys.string(), text);
    }

    std::string memory(const StagePlan& stage) const {
        const auto found = budgets_.find(stage.name);
        if (found == budgets_.end()) return "";
        const StageBudget& budget = found->second;
        if (!budget.open.empty()) return fmt::format("# No MemoryMax: {}.\n", plain(budget.open));
        return fmt::format("MemoryMax={}\n", budget.limit_bytes());
    }

    /// Folders that it writes to, besides those that systemd makes for it.
    std::set<std::string> writable(const StagePlan& stage) const {
        std::set<std::string> folders;
        for (const char* key : {"disk_cache", "warm_file", "trace", "session_dir"})
            for (const std::string& path : settings_of(stage, key))
                if (path.starts_with('/')) folders.insert(fs::path(path).parent_path().string());
        return folders;
    }

    std::string protection(const StagePlan& stage) const {
        // A manager of one user may not do most of it, and a wrapper needs what it needs.
        if (command_.user_units || stage.wrapped || !is_ours(stage)) return "NoNewPrivileges=yes\n";
        std::string text =
            "NoNewPrivileges=yes\nProtectSystem=strict\nProtectHome=read-only\n"
            "ProtectKernelTunables=yes\nProtectKernelModules=yes\nProtectKernelLogs=yes\n"
            "ProtectControlGroups=yes\nRestrictSUIDSGID=yes\nRestrictRealtime=yes\n"
            "RestrictNamespaces=yes\nLockPersonality=yes\nSystemCallArchitectures=native\n"
            "RestrictAddressFamilies=AF_UNIX AF_INET AF_INET6 AF_NETLINK\n"
            "# Waking idle cores quickly (wake = \"fast\") takes this device.\n"
            "DevicePolicy=closed\nDeviceAllow=/dev/cpu_dma_latency rw\nLimitMEMLOCK=infinity\n";
        for (const std::string& folder : writable(stage))
            text += fmt::format("ReadWritePaths={}\n", quoted("-" + folder, false));
        return text;
    }

    Result<std::string> unit_text(const StagePlan& given) const {
        if (given.terminal)
            return Error{ErrorCode::invalid_argument,
                         fmt::format("{}: {} wants a terminal, and a unit has none",
                                     spec_.file.string(), given.name),
                         "set terminal = false, or remove its wrap"};
        ASSIGN_OR_RETURN(const StagePlan stage, placed(given));
        std::string text = head(stage.host);
        auto out = std::back_inserter(text);
        const bool is_told =
            is_ours(stage);  // a stand-in need not know how to say that it is ready
        const bool has_tcp = stage.endpoint.starts_with("tcp://");
        fmt::format_to(out, "\n[Unit]\nDescription=k3pipe {}, {}\nPartOf={}\n", plan_.name,
                       stage.name, target());
        if (has_tcp && !command_.user_units)
            fmt::format_to(out, "Wants=network-online.target\nAfter=network-online.target\n");
        if (const auto units = before(stage); !units.empty())
            fmt::format_to(out, "After={}\n", fmt::join(units, " "));
        fmt::format_to(out, "StartLimitIntervalSec={}\nStartLimitBurst={}\n",
                       spec_.restart_window_s, spec_.max_restarts + 1);

        fmt::format_to(out, "\n[Service]\nType={}\n", is_told ? "notify" : "exec");
        if (is_told && stage.wrapped) fmt::format_to(out, "NotifyAccess=all\n");
        if (is_told && !stage.wrapped) fmt::format_to(out, "WatchdogSec=30\n");
        if (!command_.user_units && !command_.account.empty())
            fmt::format_to(out, "User={}\n", command_.account);
        fmt::format_to(out, "ExecStart={}\n", command_line(stage));
        for (const auto& [name, value] : rendered_environment(stage))
            fmt::format_to(out, "Environment={}\n",
                           word_of(fmt::format("{}={}", name, value), false));
        text += credential(stage);
        const bool restarts = stage.restart == RestartPolicy::on_failure && spec_.max_restarts > 0;
        fmt::format_to(out, "Restart={}\n", restarts ? "on-failure" : "no");
        // Bad settings and a bad model stay what they are.
        if (restarts) fmt::format_to(out, "RestartSec=1\nRestartPreventExitStatus=2 3\n");
        fmt::format_to(out,
                       "# A service that loads asks for more, as long as it gets on.\n"
                       "TimeoutStartSec={}\nTimeoutStopSec=10\n",
                       std::max<std::int64_t>(spec_.start_timeout_s, 120));
        fmt::format_to(out,
                       "UMask=0077\nRuntimeDirectory=k3pipe-{0}\nRuntimeDirectoryMode=0700\n"
                       "RuntimeDirectoryPreserve=yes\n",
                       plan_.name);
        if (stage.kind == ServiceKind::trunk && !command_.user_units)
            fmt::format_to(out, "StateDirectory=k3pipe-{}\nStateDirectoryMode=0700\n", plan_.name);
        text += memory(stage);
        if (const std::string cores = setting_of(stage, "cores", ""); !cores.empty())
            fmt::format_to(out, "CPUAffinity={}\n", cores);
        text += protection(stage);
        return text;
    }

    const RenderCommand& command_;
    const PipelineSpec& spec_;
    const PipelinePlan& plan_;
    const std::map<std::string, StageBudget>& budgets_;
};

bool is_legal_account(std::string_view name) noexcept {
    return !name.empty() && name.front() != '-' && name.size() <= 64 &&
           std::ranges::all_of(name, [](char c) {
               return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') ||
                      c == '-' || c == '_' || c == '.';
           });
}

/// Whose files and sockets they are: whoever renders, unless that is root, who says so.
Result<std::string> account_of(const RenderCommand& command) {
    if (command.user_units) return std::string();
    if (!command.account.empty()) {
        if (is_legal_account(command.account)) return command.account;
        return Error{ErrorCode::invalid_argument,
                     fmt::format("'{}' is no name of a user", command.account),
                     "give --account the name of the user whose processes they will be"};
    }
    const passwd* entry = ::geteuid() == 0 ? nullptr : ::getpwuid(::geteuid());
    return entry == nullptr ? std::string() : std::string(entry->pw_name);
}

/// Where RuntimeDirectory lies for a user's own manager.
fs::path user_runtime_directory() {
    const char* given = std::getenv("XDG_RUNTIME_DIR");
    if (given != nullptr && *given == '/') return given;
    return fmt::format("/run/user/{}", ::geteuid());
}

}  // namespace

Result<std::vector<RenderedFile>> render_systemd(const RenderCommand& given, PipelineSpec spec) {
    RenderCommand command = given;
    ASSIGN_OR_RETURN(command.account, account_of(given));
    ASSIGN_OR_RETURN(const auto budgets, stage_budgets(spec));
    RETURN_IF_ERROR(resolve_addresses(&spec));
    // What RuntimeDirectory and StateDirectory stand for.
    const fs::path run = command.user_units ? user_runtime_directory() : fs::path("/run");
    if (!command.user_units)
        for (StageSpec& stage : spec.stages)
            if (stage.kind == ServiceKind::trunk && !stage.attached() && stage.binary.empty() &&
                stage.find("session_dir") == nullptr)
                stage.settings.push_back(
                    {"session_dir", {fmt::format("/var/lib/k3pipe-{}/sessions", spec.name)}});
    ASSIGN_OR_RETURN(const PipelinePlan plan, make_plan(spec, run / ("k3pipe-" + spec.name), 0));
    RETURN_IF_ERROR(check_settings(plan));
    return SystemdRenderer(command, spec, plan, budgets).run();
}

}  // namespace k3::launcher
