#include "launcher/stage_plan.h"

#include <arpa/inet.h>
#include <fmt/format.h>
#include <netinet/in.h>

#include <algorithm>
#include <array>
#include <map>

#include "common/model/config.h"
#include "common/transport/endpoint.h"
#include "launcher/paths.h"
#include "launcher/pipeline_keys.h"

namespace k3::launcher {

namespace fs = std::filesystem;
using msg::ServiceKind;

namespace {

bool needs_model(ServiceKind kind) {
    return kind == ServiceKind::tokenizer || kind == ServiceKind::experts ||
           kind == ServiceKind::trunk;
}

constexpr std::size_t kMaxPort = 65535;

std::string flag_of(std::string name) {
    std::replace(name.begin(), name.end(), '_', '-');
    return "--" + name;
}

/// Whether a process of another box connects to it: its callers (docs/protocol.md), or the
/// launcher, who watches every stage and whose clients speak to the gateway.
bool is_called_across_boxes(const PipelineSpec& spec, const StageSpec& stage) {
    if (!stage.host.empty()) return true;
    const ServiceKind caller =
        stage.kind == ServiceKind::experts ? ServiceKind::trunk : ServiceKind::gateway;
    return stage.kind != ServiceKind::gateway &&
           std::any_of(spec.stages.begin(), spec.stages.end(), [caller](const StageSpec& other) {
               return other.kind == caller && !other.host.empty();
           });
}

std::string tcp_endpoint(const std::string& address, std::string_view port) {
    return address.find(':') == std::string::npos ? fmt::format("tcp://{}:{}", address, port)
                                                  : fmt::format("tcp://[{}]:{}", address, port);
}

std::string address_of(const PipelineSpec& spec, const StageSpec& stage) {
    const HostSpec* host = spec.host_of(stage);
    return host == nullptr ? spec.address : host->address;
}

/// What a stage binds.
Result<std::string> listen_of(const PipelineSpec& spec, const StageSpec& stage, std::size_t place,
                              const fs::path& run_directory) {
    if (stage.attached()) return stage.endpoint;
    const bool across = is_called_across_boxes(spec, stage);
    if (across && stage.listen.empty()) {
        const std::size_t port = static_cast<std::size_t>(spec.port_base) + place;
        if (port <= kMaxPort) return tcp_endpoint(address_of(spec, stage), std::to_string(port));
        return Error{ErrorCode::invalid_argument,
                     fmt::format("{}:{}: {} is stage {} and would listen at port {}, and the last "
                                 "one is {}",
                                 spec.file.string(), stage.line, stage.name, place, port, kMaxPort),
                     fmt::format("set port_base in [pipeline] to {} or less", kMaxPort - place)};
    }
    std::string endpoint = stage.listen;
    if (endpoint.empty()) endpoint = "ipc://" + (run_directory / (stage.name + ".sock")).string();
    if (!endpoint.starts_with("ipc://")) return endpoint;
    if (across)
        return Error{ErrorCode::invalid_argument,
                     fmt::format("{}:{}: {} listens at {}, and a stage on another box calls it",
                                 spec.file.string(), stage.line, stage.name, endpoint),
                     "leave listen out, or write tcp://address:port"};
    std::string path = endpoint.substr(6);
    if (path.size() <= kMaxSocketPath) return endpoint;
    return Error{ErrorCode::invalid_argument,
                 fmt::format("socket path {} of {} in {} has {} bytes, and the system allows {}",
                             path, stage.name, spec.file.string(), path.size(), kMaxSocketPath),
                 "set XDG_RUNTIME_DIR or run_dir to a shorter folder"};
}

/// An address in digits that others can connect to as it is written: ZeroMQ also binds names of
/// interfaces and IPv6 without brackets.
bool is_reachable(const transport::Endpoint& endpoint) {
    if (endpoint.kind == transport::Endpoint::Kind::ipc || endpoint.host == "localhost")
        return true;
    std::array<unsigned char, sizeof(in6_addr)> bytes{};
    if (::inet_pton(AF_INET, endpoint.host.c_str(), bytes.data()) == 1) return true;
    const std::string digits = endpoint.host.substr(0, endpoint.host.find('%'));
    return ::inet_pton(AF_INET6, digits.c_str(), bytes.data()) == 1 &&
           endpoint.text.find('[') != std::string::npos;
}

/// What others connect to, when the stage binds `listen`: a wildcard is no address to go to.
Result<std::string> endpoint_of(const PipelineSpec& spec, const StageSpec& stage,
                                const std::string& listen) {
    ASSIGN_OR_RETURN(const transport::Endpoint parsed, transport::parse_endpoint(listen));
    const bool wildcard = parsed.host == "*" || parsed.host == "0.0.0.0" || parsed.host == "::";
    if (wildcard) {
        const std::string address = address_of(spec, stage);
        const char* loopback = parsed.host == "::" ? "::1" : "127.0.0.1";
        return tcp_endpoint(address.empty() ? loopback : address, parsed.port);
    }
    if (stage.attached() || is_reachable(parsed)) return listen;
    return Error{ErrorCode::invalid_argument,
                 fmt::format("{}:{}: {} listens at {}, and '{}' is no address that others can "
                             "connect to",
                             spec.file.string(), stage.line, stage.name, listen, parsed.host),
                 "write an address of its box in digits, in brackets if it has colons: "
                 "tcp://[fd00::2]:7000"};
}

Result<fs::path> model_of(const PipelineSpec& spec, const StageSpec& stage) {
    if (!needs_model(stage.kind)) return fs::path();
    const HostSpec* host = spec.host_of(stage);
    fs::path model = stage.model;
    if (model.empty() && host != nullptr) model = host->model;
    if (model.empty()) model = spec.model;
    if (model.empty())
        return Error{ErrorCode::invalid_argument,
                     fmt::format("{}: {} needs a checkpoint and none is named", spec.file.string(),
                                 stage.name),
                     "set model = \"DIRECTORY\" in [pipeline]"};
    if (host != nullptr) return model;  // its box is asked before anything starts (host_check.h)
    RETURN_IF_ERROR(model::check_model_directory(model));
    return model;
}

/// A checkpoint that this box can read the layers of: the pipeline's, or one of a stage that runs
/// here.
Result<fs::path> readable_model(const PipelineSpec& spec,
                                const std::vector<const StageSpec*>& trunks) {
    for (const StageSpec* stage : trunks)
        if (stage->host.empty()) return model_of(spec, *stage);
    std::error_code code;
    if (fs::is_directory(spec.model, code)) return spec.model;
    return Error{ErrorCode::invalid_argument,
                 fmt::format("{}: all {} trunk stages are on other boxes, and this one has no "
                             "checkpoint to count layers in",
                             spec.file.string(), trunks.size()),
                 "give layers = \"A-B\" to every trunk"};
}

/// "0-4" for stage i of n, or what the file says. Empty on a single stage: all layers.
Result<std::vector<std::string>> layer_ranges(const PipelineSpec& spec) {
    std::vector<const StageSpec*> trunks = spec.of_kind(ServiceKind::trunk);
    std::vector<std::string> ranges(trunks.size());
    std::size_t owned = 0;
    std::size_t given = 0;
    for (const StageSpec* stage : trunks) {
        owned += stage->attached() ? 0 : 1;
        given += stage->find("layers") != nullptr ? 1 : 0;
    }
    if (trunks.size() == 1 || given == owned) return ranges;
    if (given != 0 || owned != trunks.size())
        return Error{ErrorCode::invalid_argument,
                     fmt::format("{}: {} of {} trunk stages have no layers", spec.file.string(),
                                 owned - given, trunks.size()),
                     "give layers = \"A-B\" to every trunk started here, or to none"};
    ASSIGN_OR_RETURN(fs::path model, readable_model(spec, trunks));
    ASSIGN_OR_RETURN(model::ModelConfig config, model::load_config(model));
    std::size_t n = trunks.size();
    if (n > config.n_layers)
        return Error{ErrorCode::invalid_argument,
                     fmt::format("{}: {} trunk stages for the {} layers of {}", spec.file.string(),
                                 n, config.n_layers, model.string()),
                     "use fewer stages"};
    for (std::size_t i = 0; i < n; ++i)
        ranges[i] =
            fmt::format("{}-{}", i * config.n_layers / n, (i + 1) * config.n_layers / n - 1);
    return ranges;
}

/// Wrapper and program. Those of another box are looked for there.
Result<std::vector<std::string>> command_head(const StageSpec& stage) {
    std::vector<std::string> argv = stage.wrap;
    argv.push_back(stage.binary.empty() ? "k3-" + std::string(to_string(stage.kind))
                                        : stage.binary);
    if (!stage.host.empty()) return argv;
    if (!stage.wrap.empty()) {
        ASSIGN_OR_RETURN(fs::path wrapper,
                         find_program(stage.wrap.front(), "wrap of " + stage.name));
        argv.front() = wrapper.string();
    }
    ASSIGN_OR_RETURN(fs::path program, find_program(argv.back(), "binary of " + stage.name));
    argv.back() = program.string();
    return argv;
}

void append_settings(const StagePlan& plan, std::vector<std::string>* argv) {
    for (const ServiceSetting& setting : plan.settings) {
        if (setting.values.empty()) argv->push_back(flag_of(setting.name));
        for (const std::string& value : setting.values) {
            argv->push_back(flag_of(setting.name));
            argv->push_back(value);
        }
    }
}

class Planner {
  public:
    Planner(const PipelineSpec& spec, PipelinePlan& plan) : spec_(spec), plan_(plan) {}

    Status run() {
        ASSIGN_OR_RETURN(ranges_, layer_ranges(spec_));
        for (std::size_t place = 0; place < spec_.stages.size(); ++place) {
            const StageSpec& stage = spec_.stages[place];
            ASSIGN_OR_RETURN(std::string listen,
                             listen_of(spec_, stage, place, plan_.run_directory));
            ASSIGN_OR_RETURN(std::string endpoint, endpoint_of(spec_, stage, listen));
            RETURN_IF_ERROR(check_endpoint_is_free(stage, endpoint));
            listens_[stage.kind].push_back(std::move(listen));
            endpoints_[stage.kind].push_back(std::move(endpoint));
        }
        RETURN_IF_ERROR(find_keys());
        std::map<ServiceKind, std::size_t> next;
        for (const StageSpec& stage : spec_.stages) {
            std::size_t i = next[stage.kind]++;
            StagePlan plan;
            plan.kind = stage.kind;
            plan.name = stage.name;
            plan.box = stage.box;
            if (stage.line > 0) plan.where = fmt::format("{}:{}", spec_.file.string(), stage.line);
            plan.endpoint = endpoints_[stage.kind][i];
            plan.owned = !stage.attached();
            if (plan.owned) RETURN_IF_ERROR(complete(stage, i, &plan));
            plan_.stages.push_back(std::move(plan));
        }
        return Status::ok();
    }

  private:
    Status check_endpoint_is_free(const StageSpec& stage, const std::string& endpoint) const {
        for (const auto& [kind, endpoints] : endpoints_)
            if (std::find(endpoints.begin(), endpoints.end(), endpoint) != endpoints.end())
                return Error{ErrorCode::invalid_argument,
                             fmt::format("{}:{}: {} has the same endpoint {} as a {} stage",
                                         spec_.file.string(), stage.line, stage.name, endpoint,
                                         to_string(kind)),
                             "give every stage its own endpoint"};
        return Status::ok();
    }

    /// Those of the file or of the default place, if there is a tcp endpoint to use them at.
    Status find_keys() {
        std::size_t n_tcp = 0;
        for (const auto& [kind, endpoints] : endpoints_)
            n_tcp +=
                static_cast<std::size_t>(std::count_if(endpoints.begin(), endpoints.end(), is_tcp));
        if (n_tcp == 0) return Status::ok();
        std::error_code code;
        fs::path file = key_file_of(spec_);
        if (!spec_.keys.empty() || fs::exists(file, code)) plan_.keys = std::move(file);
        if (!plan_.keys.empty()) return Status::ok();
        std::map<ServiceKind, std::size_t> next;
        for (const StageSpec& stage : spec_.stages) {
            const std::string& endpoint = endpoints_[stage.kind][next[stage.kind]++];
            if (stage.attached() || spec_.insecure || stage.find("insecure") != nullptr) continue;
            ASSIGN_OR_RETURN(const transport::Endpoint parsed, transport::parse_endpoint(endpoint));
            if (parsed.is_local()) continue;
            return Error{ErrorCode::invalid_argument,
                         fmt::format("{}:{}: other boxes can reach {} at {}, and pipeline '{}' has "
                                     "no keys ({} does not exist)",
                                     spec_.file.string(), stage.line, stage.name, endpoint,
                                     spec_.name, file.string()),
                         "make them with `k3pipe keys -c FILE`, or set insecure = true in "
                         "[pipeline] if everyone in the network is trusted"};
        }
        return Status::ok();
    }

    static bool is_tcp(const std::string& endpoint) { return endpoint.starts_with("tcp://"); }

    /// True if the stage answers, or calls somebody, on tcp.
    bool needs_keys(ServiceKind kind, const std::string& own) const {
        std::vector<ServiceKind> callees;
        if (kind == ServiceKind::trunk) callees = {ServiceKind::experts};
        if (kind == ServiceKind::gateway)
            callees = {ServiceKind::tokenizer, ServiceKind::trunk, ServiceKind::sampler};
        return is_tcp(own) ||
               std::any_of(callees.begin(), callees.end(), [this](ServiceKind callee) {
                   const auto& endpoints = endpoints_.at(callee);
                   return std::any_of(endpoints.begin(), endpoints.end(), is_tcp);
               });
    }

    Status complete(const StageSpec& stage, std::size_t index, StagePlan* plan) {
        plan->env = stage.env;
        plan->restart = stage.restart;
        plan->wrapped = !stage.wrap.empty();
        plan->n_wrap = stage.wrap.size();
        plan->host = stage.host;
        if (!stage.host.empty()) plan->client = spec_.client;
        plan->terminal = stage.terminal;
        plan->settings = stage.settings;
        ASSIGN_OR_RETURN(plan->model, model_of(spec_, stage));
        ASSIGN_OR_RETURN(std::vector<std::string> argv, command_head(stage));
        auto add = [&argv](std::string flag, std::string value) {
            argv.push_back(std::move(flag));
            argv.push_back(std::move(value));
        };
        const std::string& listen = listens_[stage.kind][index];
        add("--listen", listen);
        add("--name", stage.name);
        add("--run-id", fmt::format("{:x}", plan_.run_id));
        if (stage.find("payload") == nullptr) add("--payload", spec_.payload);
        if (stage.find("log_level") == nullptr) add("--log-level", spec_.log_level);
        if (!plan->model.empty()) add("--model", plan->model.string());
        if (spec_.insecure && plan_.keys.empty() && is_tcp(listen) &&
            stage.find("insecure") == nullptr)
            argv.emplace_back("--insecure");
        if (stage.kind == ServiceKind::trunk) {
            if (!ranges_[index].empty()) plan->settings.push_back({"layers", {ranges_[index]}});
            for (const std::string& experts : endpoints_[ServiceKind::experts])
                add("--experts", experts);
            // Not to a stand-in: it need not know what a session directory is.
            const fs::path sessions = default_session_directory();
            const bool own = stage.binary.empty() && stage.find("session_dir") == nullptr;
            plan->own_sessions = own && !stage.host.empty();
            if (own && stage.host.empty() && !sessions.empty())
                add("--session-dir", sessions.string());
        }
        if (stage.kind == ServiceKind::gateway) {
            if (stage.find("model_name") == nullptr)
                add("--model-name",
                    spec_.model.empty() ? spec_.name : spec_.model.filename().string());
            add("--tokenizer", endpoints_[ServiceKind::tokenizer].front());
            for (const std::string& trunk : endpoints_[ServiceKind::trunk]) add("--trunk", trunk);
            add("--sampler", endpoints_[ServiceKind::sampler].front());
        }
        if (!plan_.keys.empty() && needs_keys(stage.kind, plan->endpoint)) {
            plan->keys = plan_.keys;
            // Another box is handed the keys themselves, and knows where it put them.
            if (stage.host.empty()) add("--keys", plan->keys.string());
        }
        append_settings(*plan, &argv);
        plan->argv = std::move(argv);
        return Status::ok();
    }

    const PipelineSpec& spec_;
    PipelinePlan& plan_;
    std::map<ServiceKind, std::vector<std::string>> listens_;
    std::map<ServiceKind, std::vector<std::string>> endpoints_;
    std::vector<std::string> ranges_;
};

}  // namespace

bool PipelinePlan::has_remote() const noexcept {
    return std::any_of(stages.begin(), stages.end(),
                       [](const StagePlan& stage) { return !stage.host.empty(); });
}

PipelinePlan PipelinePlan::on_this_box() const {
    PipelinePlan local = *this;
    std::erase_if(local.stages, [](const StagePlan& stage) { return !stage.host.empty(); });
    return local;
}

PipelinePlan PipelinePlan::as_if_here(const fs::path& checkpoint) const {
    PipelinePlan all = *this;
    for (StagePlan& stage : all.stages) {
        if (stage.host.empty()) continue;
        stage.host.clear();
        if (!stage.model.empty()) stage.model = checkpoint;
        std::erase_if(stage.settings, [](const ServiceSetting& s) { return s.name == "pack"; });
    }
    return all;
}

const StagePlan& PipelinePlan::gateway() const noexcept { return stages.back(); }

std::size_t PipelinePlan::n_owned() const noexcept {
    return static_cast<std::size_t>(
        std::count_if(stages.begin(), stages.end(), [](const StagePlan& s) { return s.owned; }));
}

Result<PipelinePlan> make_plan(const PipelineSpec& spec, const fs::path& run_directory,
                               std::uint64_t run_id) {
    PipelinePlan plan;
    plan.name = spec.name;
    plan.model = spec.model;
    plan.placement = spec.placement;
    plan.run_directory = run_directory;
    plan.run_id = run_id;
    RETURN_IF_ERROR(Planner(spec, plan).run());
    std::size_t terminals = static_cast<std::size_t>(std::count_if(
        plan.stages.begin(), plan.stages.end(), [](const StagePlan& s) { return s.terminal; }));
    if (terminals > 1)
        return Error{ErrorCode::invalid_argument,
                     fmt::format("{}: {} stages want the terminal, and there is one",
                                 spec.file.string(), terminals),
                     "debug one stage at a time, or set terminal = false"};
    return plan;
}

}  // namespace k3::launcher
