// render_kubernetes of render.h.
//
// To the plan a pod is a box of its own: a stage in it gets an address that the cluster's names
// resolve to, and everything else follows as for boxes over ssh.

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cctype>
#include <fstream>
#include <iterator>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>

#include "common/base/cores.h"
#include "common/transport/endpoint.h"
#include "launcher/pipeline_keys.h"
#include "launcher/pod_groups.h"
#include "launcher/render.h"
#include "launcher/stage_weights.h"
#include "launcher/yaml.h"

namespace k3::launcher {

namespace fs = std::filesystem;
using Json = nlohmann::ordered_json;
using msg::ServiceKind;

namespace {

constexpr const char* kConfigFolder = "/etc/k3pipe";
constexpr const char* kKeysFolder = "/run/k3pipe-keys";
constexpr const char* kKeysFile = "keys";
constexpr const char* kSessions = "/var/lib/k3pipe/sessions";
constexpr const char* kPlacementName = "pipeline.placement";
constexpr const char* kIndex = "K3PIPE_POD_INDEX";
// The name of a pod's stateful set becomes a label of 63 characters with a hash behind it.
constexpr std::size_t kMaxName = 52;
constexpr std::size_t kMaxConfigMap = 1'000'000;  // of 1 MiB, keys and names included

/// Ports differ by kind only: every pod has an address of its own.
std::int64_t port_of(const PipelineSpec& spec, ServiceKind kind) {
    constexpr std::array kOrder = {ServiceKind::gateway, ServiceKind::experts, ServiceKind::trunk,
                                   ServiceKind::tokenizer, ServiceKind::sampler};
    return spec.port_base + (std::ranges::find(kOrder, kind) - kOrder.begin());
}

class KubernetesRenderer {
  public:
    KubernetesRenderer(const RenderCommand& command, PipelineSpec spec)
        : command_(command), spec_(std::move(spec)) {}

    Result<std::vector<RenderedFile>> run() {
        RETURN_IF_ERROR(check());
        ASSIGN_OR_RETURN(budgets_, stage_budgets(spec_));
        groups_ = make_pod_groups(spec_);
        for (PodGroup& group : groups_) group.name = object(group.name);
        RETURN_IF_ERROR(check_names());
        ASSIGN_OR_RETURN(plan_, make_plan(as_pods(), "/run/k3pipe", 0));
        for (StagePlan& stage : plan_.stages) complete(stage);
        std::vector<RenderedFile> files;
        ASSIGN_OR_RETURN(Json config, config_map());
        add(std::move(config), &files);
        for (const PodGroup& group : groups_) {
            add(headless_service(group), &files);
            add(stateful_set(group), &files);
        }
        add(gateway_service(), &files);
        return files;
    }

  private:
    // ---- what a cluster cannot have ------------------------------------------------------------

    Error refusal(const StageSpec& stage, std::string_view what, std::string remedy) const {
        return {ErrorCode::invalid_argument,
                fmt::format("{}:{}: {} {}", spec_.file.string(), stage.line, stage.name, what),
                std::move(remedy)};
    }

    Status check() const {
        for (const StageSpec& stage : spec_.stages) {
            if (!stage.host.empty())
                return refusal(stage,
                               fmt::format("has host = '{}', and in a cluster Kubernetes chooses "
                                           "the nodes",
                                           stage.host),
                               "remove host; pods of expert servers are spread over the nodes");
            if (!stage.listen.empty())
                return refusal(stage, fmt::format("listens at {}, which no pod can", stage.listen),
                               "remove listen; every pod has an address of its own");
            if (stage.terminal)
                return refusal(stage, "wants a terminal, and a container has none",
                               "set terminal = false, or remove its wrap");
            if (!stage.attached()) continue;
            const auto endpoint = transport::parse_endpoint(stage.endpoint);
            if (!endpoint.has_value() || endpoint->is_local())
                return refusal(stage,
                               fmt::format("runs at {}, which a pod cannot reach", stage.endpoint),
                               "give a tcp address that the cluster reaches, or remove endpoint");
        }
        const StageSpec& gateway = spec_.stages.back();
        if (gateway.attached())
            return refusal(gateway, "is attached, so there is nothing to serve from the cluster",
                           "remove endpoint of [gateway]");
        return Status::ok();
    }

    Status check_names() const {
        std::set<std::string> names;
        for (const PodGroup& group : groups_) {
            if (group.name.size() > kMaxName)
                return Error{
                    ErrorCode::invalid_argument,
                    fmt::format("{}: '{}' has {} characters, and the name of a stateful "
                                "set may have {}",
                                spec_.file.string(), group.name, group.name.size(), kMaxName),
                    "give the pipeline a shorter name (--name)"};
            if (!names.insert(group.name).second)
                return Error{ErrorCode::invalid_argument,
                             fmt::format("{}: two stages would be called '{}' in the cluster",
                                         spec_.file.string(), group.name),
                             "give them names that differ without case and underscores"};
        }
        return Status::ok();
    }

    std::string object(std::string_view name) const {
        return fmt::format("k3pipe-{}{}{}", dns_name(spec_.name), name.empty() ? "" : "-",
                           dns_name(name));
    }

    const PodGroup& front() const { return groups_.back(); }

    // ---- the plan, with a pod as the host of its stages ----------------------------------------

    static std::string pod_address(const PodGroup& group, std::size_t place) {
        const std::size_t ordinal = group.is_numbered ? group.first_ordinal + place : 0;
        return fmt::format("{0}-{1}.{0}", group.name, ordinal);
    }

    PipelineSpec as_pods() const {
        PipelineSpec pods = spec_;
        pods.hosts.clear();
        std::error_code code;
        if (!spec_.insecure || fs::exists(key_file_of(spec_), code))
            pods.keys = fs::path(kKeysFolder) / kKeysFile;
        for (const PodGroup& group : groups_)
            for (std::size_t place = 0; place < group.stages.size(); ++place) {
                StageSpec& stage = pods.stages[group.stages[place]];
                stage.host = pod_address(group, place);
                pods.hosts.push_back(
                    {.name = stage.host, .address = stage.host, .model = "", .binary = ""});
                // Within a pod nobody else hears what is said over its loopback.
                const bool is_inner = &group == &front() && stage.kind != ServiceKind::gateway;
                stage.listen = fmt::format("tcp://{}:{}", is_inner ? "127.0.0.1" : "0.0.0.0",
                                           port_of(spec_, stage.kind));
                for (ServiceSetting& setting : stage.settings)
                    if (setting.name == "share" && !spec_.placement.empty())
                        setting.values = {
                            fmt::format("@{}/{}#{}", kConfigFolder, kPlacementName, stage.name)};
                if (stage.kind == ServiceKind::trunk && stage.binary.empty() &&
                    stage.find("session_dir") == nullptr)
                    stage.settings.push_back({"session_dir", {kSessions}});
            }
        return pods;
    }

    bool is_ours(const StagePlan& stage) const {
        return std::ranges::find(spec_.stages, stage.name, &StageSpec::name)->binary.empty();
    }

    void complete(StagePlan& stage) const {
        if (!stage.owned) return;
        place_program(command_.programs, is_ours(stage), &stage);
        if (!stage.keys.empty()) {
            stage.argv.emplace_back("--keys");
            stage.argv.push_back(stage.keys.string());
        }
    }

    // ---- objects -------------------------------------------------------------------------------

    Json labels(const std::string& part) const {
        Json labels = {{"app.kubernetes.io/name", "k3pipe"},
                       {"app.kubernetes.io/instance", dns_name(spec_.name)}};
        if (!part.empty()) labels["app.kubernetes.io/component"] = part;
        return labels;
    }

    Json object_of(const char* api, const char* kind, const std::string& name,
                   const std::string& part) const {
        return {{"apiVersion", api},
                {"kind", kind},
                {"metadata", {{"name", name}, {"labels", labels(part)}}}};
    }

    std::string head() const {
        return fmt::format("{} kubernetes from {}\n", kRenderedMagic,
                           spec_.file.filename().string());
    }

    void add(Json json, std::vector<RenderedFile>* files) const {
        std::string kind = json["kind"].get<std::string>();
        std::ranges::transform(kind, kind.begin(), [](unsigned char c) { return std::tolower(c); });
        files->push_back(
            {fmt::format("{}-{}.yaml", json["metadata"]["name"].get<std::string>(), kind),
             head() + to_yaml(json)});
    }

    static Result<std::string> content_of(const fs::path& path) {
        std::ifstream stream(path, std::ios::binary);
        std::string text(std::istreambuf_iterator<char>(stream), {});
        if (stream.bad() || !stream.is_open())
            return Error{ErrorCode::not_found, fmt::format("cannot read {}", path.string()),
                         "check the path and its permissions"};
        return text;
    }

    /// The files that servers read; the pipeline file is for people.
    Result<Json> config_map() const {
        Json config = object_of("v1", "ConfigMap", object(""), "");
        ASSIGN_OR_RETURN(config["data"]["pipeline.toml"], content_of(spec_.file));
        std::size_t size = config["data"]["pipeline.toml"].get_ref<const std::string&>().size();
        if (!spec_.placement.empty()) {
            ASSIGN_OR_RETURN(config["data"][kPlacementName], content_of(spec_.placement));
            size += config["data"][kPlacementName].get_ref<const std::string&>().size();
        }
        if (size <= kMaxConfigMap) return config;
        return Error{ErrorCode::resource_exhausted,
                     fmt::format("{} and its placement have {} bytes, and a ConfigMap holds {}",
                                 spec_.file.string(), size, kMaxConfigMap),
                     "use fewer expert servers, or shares instead of a placement"};
    }

    static Json port(const char* name, std::int64_t number) {
        return {{"name", name}, {"port", number}, {"targetPort", number}};
    }

    Json headless_service(const PodGroup& group) const {
        Json service = object_of("v1", "Service", group.name, part_of(group));
        // Callers look a stage up before it is ready, and wait for it themselves.
        service["spec"] = {{"clusterIP", "None"},
                           {"publishNotReadyAddresses", true},
                           {"selector", labels(part_of(group))},
                           {"ports", Json::array()}};
        const ServiceKind kind =
            &group == &front() ? ServiceKind::gateway : spec_.stages[group.stages[0]].kind;
        service["spec"]["ports"].push_back(port("k3pipe", port_of(spec_, kind)));
        return service;
    }

    Json gateway_service() const {
        Json service = object_of("v1", "Service", object(""), part_of(front()));
        service["spec"] = {{"type", "ClusterIP"}, {"selector", labels(part_of(front()))}};
        service["spec"]["ports"] =
            Json::array({port("k3pipe", port_of(spec_, ServiceKind::gateway))});
        return service;
    }

    std::string part_of(const PodGroup& group) const {
        return group.name.substr(object("").size() + 1);
    }

    Json stateful_set(const PodGroup& group) const {
        std::vector<const StagePlan*> members;
        for (std::size_t i : group.stages) members.push_back(&plan_.stages[i]);
        if (group.is_numbered) members.resize(1);  // the others are like it

        Json pod;
        pod["automountServiceAccountToken"] = false;
        pod["enableServiceLinks"] = false;
        // Whoever finds a segment in shared memory can tell whether its owner lives.
        pod["shareProcessNamespace"] = true;
        pod["terminationGracePeriodSeconds"] = 15;
        pod["securityContext"]["seccompProfile"]["type"] = "RuntimeDefault";
        if (group.is_numbered) pod["topologySpreadConstraints"] = Json::array({spread(group)});
        Volumes volumes;
        pod["containers"] = Json::array();
        for (const StagePlan* stage : members)
            pod["containers"].push_back(container(group, *stage, &volumes));
        std::uint64_t segment_bytes = 0;
        for (const StagePlan* stage : members) segment_bytes += budget_of(*stage).segment_bytes;
        volumes.list.push_back(
            {{"name", "shm"},
             {"emptyDir",
              {{"medium", "Memory"}, {"sizeLimit", mebibytes(segment_bytes + (16U << 20U))}}}});
        pod["volumes"] = std::move(volumes.list);

        Json set = object_of("apps/v1", "StatefulSet", group.name, part_of(group));
        Json& spec = set["spec"];
        spec["serviceName"] = group.name;
        spec["replicas"] = group.is_numbered ? group.stages.size() : 1;
        if (group.first_ordinal > 0) spec["ordinals"]["start"] = group.first_ordinal;
        spec["podManagementPolicy"] = "Parallel";
        spec["selector"]["matchLabels"] = labels(part_of(group));
        spec["template"]["metadata"]["labels"] = labels(part_of(group));
        spec["template"]["spec"] = std::move(pod);
        return set;
    }

    /// Two servers of a pipeline on one node share its disk, so rather not.
    Json spread(const PodGroup& group) const {
        return {{"maxSkew", 1},
                {"topologyKey", "kubernetes.io/hostname"},
                {"whenUnsatisfiable", "ScheduleAnyway"},
                {"labelSelector", {{"matchLabels", labels(part_of(group))}}}};
    }

    static std::string mebibytes(std::uint64_t bytes) {
        return fmt::format("{}Mi", (bytes + (1U << 20U) - 1) >> 20U);
    }

    StageBudget budget_of(const StagePlan& stage) const {
        const auto found = budgets_.find(stage.name);
        return found == budgets_.end() ? StageBudget{} : found->second;
    }

    /// A word for Kubernetes, which fills in $(NAME).
    static std::string escaped(const std::string& word) {
        std::string out;
        for (std::size_t i = 0; i < word.size(); ++i) {
            if (word[i] == '$' && i + 1 < word.size() && word[i + 1] == '(') out += '$';
            out += word[i];
        }
        return out;
    }

    Json words(const PodGroup& group, const StagePlan& stage) const {
        Json words = Json::array();
        const std::string variable = fmt::format("$({})", kIndex);
        const std::size_t number = group.first_ordinal;  // of the member that stands for all
        for (std::size_t i = 0; i < stage.argv.size(); ++i) {
            std::string word = escaped(stage.argv[i]);
            if (group.is_numbered && i > 0 && stage.argv[i - 1] == "--share")
                word = numbered_share(word, stage.name, number, variable);
            if (group.is_numbered && i > 0 && stage.argv[i - 1] == "--name")
                word.replace(word.rfind('-') + 1, std::string::npos, variable);
            words.push_back(std::move(word));
        }
        return words;
    }

    /// `k3pipe probe` of the service in the same pod. `alive`: one that loads is fine.
    Json probe(const StagePlan& stage, bool alive, int period_s, int failures) const {
        const fs::path program =
            command_.programs.empty() ? "k3pipe" : command_.programs / "k3pipe";
        Json command = {program.string(), "probe",
                        fmt::format("tcp://127.0.0.1:{}", port_of(spec_, stage.kind))};
        if (alive) command.push_back("--alive");
        if (!stage.keys.empty())
            for (const std::string& word : {std::string("--keys"), stage.keys.string()})
                command.push_back(word);
        return {{"exec", {{"command", std::move(command)}}},
                {"periodSeconds", period_s},
                {"timeoutSeconds", 10},
                {"failureThreshold", failures}};
    }

    struct Volumes {
        Json list = Json::array();
        std::set<std::string> names;
        std::map<std::string, std::string> paths;  // of the node, and the volume's name
    };

    /// Mounts `path` of the node at the same place.
    void mount_path(const std::string& path, bool is_written, bool is_model, Json& mounts,
                    Volumes* volumes) const {
        for (const Json& mount : mounts)
            if (mount["mountPath"] == path) return;
        auto& name = volumes->paths[path];
        const bool is_new = name.empty();
        if (is_new) name = is_model ? "model" : fmt::format("path-{}", volumes->paths.size() - 1);
        mounts.push_back({{"name", name}, {"mountPath", path}});
        if (!is_written) mounts.back()["readOnly"] = true;
        if (!is_new) return;
        if (is_model && !command_.model_claim.empty())
            volumes->list.push_back({{"name", name},
                                     {"persistentVolumeClaim",
                                      {{"claimName", command_.model_claim}, {"readOnly", true}}}});
        else
            volumes->list.push_back(
                {{"name", name},
                 {"hostPath",
                  {{"path", path}, {"type", is_written ? "DirectoryOrCreate" : "Directory"}}}});
    }

    static void mount_volume(Json volume, Json mount, Json& mounts, Volumes* volumes) {
        mount["name"] = volume["name"];
        mounts.push_back(std::move(mount));
        if (volumes->names.insert(volume["name"].get<std::string>()).second)
            volumes->list.push_back(std::move(volume));
    }

    Json mounts_of(const StagePlan& stage, Volumes* volumes) const {
        Json mounts = Json::array();
        mounts.push_back({{"name", "shm"}, {"mountPath", "/dev/shm"}});
        const Json entry = {{"key", kKeysFile}, {"path", kKeysFile}};
        if (!stage.keys.empty())
            mount_volume({{"name", "keys"},
                          {"secret",
                           {{"secretName", keys_secret()},
                            {"defaultMode", 0400},
                            {"items", Json::array({entry})}}}},
                         {{"mountPath", kKeysFolder}, {"readOnly", true}}, mounts, volumes);
        if (stage.kind == ServiceKind::experts && !spec_.placement.empty())
            mount_volume({{"name", "config"}, {"configMap", {{"name", object("")}}}},
                         {{"mountPath", kConfigFolder}, {"readOnly", true}}, mounts, volumes);
        if (!stage.model.empty())
            mount_path(stage.model.string(), false, stage.model == spec_.model, mounts, volumes);
        for (const std::string& pack : settings_of(stage, "pack"))
            mount_path(fs::path(pack).parent_path().string(), false, false, mounts, volumes);
        for (const std::string& folder : settings_of(stage, "disk_cache"))
            mount_path(folder, true, false, mounts, volumes);
        for (const char* key : {"warm_file", "trace"})
            for (const std::string& file : settings_of(stage, key))
                if (file.starts_with('/'))
                    mount_path(fs::path(file).parent_path().string(), true, false, mounts, volumes);
        for (const std::string& folder : settings_of(stage, "session_dir")) {
            if (folder == kSessions)
                mount_volume({{"name", "sessions"}, {"emptyDir", Json::object()}},
                             {{"mountPath", folder}}, mounts, volumes);
            else if (!folder.empty())
                mount_path(folder, true, false, mounts, volumes);
        }
        return mounts;
    }

    std::string keys_secret() const {
        return command_.keys_secret.empty() ? kubernetes_keys_secret(spec_.name)
                                            : command_.keys_secret;
    }

    /// Cores that it computes on, as far as the file says; nothing where it does not.
    static std::optional<std::size_t> cpus(const StagePlan& stage) {
        if (const std::string cores = setting_of(stage, "cores", ""); !cores.empty())
            if (const auto set = parse_cores(cores); set.has_value()) return set->size();
        const std::string threads = setting_of(stage, "threads", "0");
        if (threads.empty() || threads == "0" || threads.size() > 6) return std::nullopt;
        return std::stoul(threads);
    }

    Json resources(const StagePlan& stage) const {
        const StageBudget budget = budget_of(stage);
        Json resources = {{"requests", {{"memory", mebibytes(budget.bytes())}}}};
        const auto n_cpus = cpus(stage);
        const bool computes =
            stage.kind == ServiceKind::trunk || stage.kind == ServiceKind::experts;
        if (n_cpus)
            resources["requests"]["cpu"] = std::to_string(*n_cpus);
        else if (!computes)
            resources["requests"]["cpu"] = "100m";
        if (budget.open.empty()) resources["limits"]["memory"] = mebibytes(budget.limit_bytes());
        return resources;
    }

    Json container(const PodGroup& group, const StagePlan& stage, Volumes* volumes) const {
        Json container;
        container["name"] = dns_name(group.is_numbered ? to_string(stage.kind) : stage.name);
        container["image"] = command_.image;
        container["command"] = words(group, stage);
        container["env"] = Json::array();
        if (group.is_numbered)
            container["env"].push_back(
                {{"name", kIndex},
                 {"valueFrom",
                  {{"fieldRef",
                    {{"fieldPath", "metadata.labels['apps.kubernetes.io/pod-index']"}}}}}});
        for (const auto& [name, value] : rendered_environment(stage))
            container["env"].push_back({{"name", name}, {"value", escaped(value)}});
        const Json port = {{"name", dns_name(to_string(stage.kind))},
                           {"containerPort", port_of(spec_, stage.kind)}};
        container["ports"] = Json::array({port});
        // Alive as soon as its socket is there, which is before it loads: so a start may take as
        // long as it takes, and still be watched.
        container["startupProbe"] = probe(stage, true, 2, 60);
        container["livenessProbe"] = probe(stage, true, 10, 6);
        container["readinessProbe"] = probe(stage, false, 5, 2);
        container["resources"] = resources(stage);
        container["securityContext"]["allowPrivilegeEscalation"] = false;
        container["volumeMounts"] = mounts_of(stage, volumes);
        return container;
    }

    const RenderCommand& command_;
    const PipelineSpec spec_;
    std::map<std::string, StageBudget> budgets_;
    std::vector<PodGroup> groups_;  // the front last
    PipelinePlan plan_;
};

}  // namespace

std::string kubernetes_keys_secret(std::string_view pipeline) {
    return fmt::format("k3pipe-{}-keys", dns_name(pipeline));
}

Result<std::vector<RenderedFile>> render_kubernetes(const RenderCommand& command,
                                                    PipelineSpec spec) {
    return KubernetesRenderer(command, std::move(spec)).run();
}

}  // namespace k3::launcher
