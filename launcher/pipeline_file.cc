#include "launcher/pipeline_file.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <fstream>
#include <iterator>
#include <set>

#include "common/model/placement_file.h"
#include "launcher/stage_table.h"
#include "launcher/toml_table.h"
#include "launcher/words.h"

namespace k3::launcher {

namespace fs = std::filesystem;
using msg::ServiceKind;

namespace {

// In the order in which stages are listed, started and shown.
constexpr std::array kKinds = {ServiceKind::tokenizer, ServiceKind::sampler, ServiceKind::experts,
                               ServiceKind::trunk, ServiceKind::gateway};

std::vector<std::string> pipeline_keys() {
    return {"name",
            "model",
            "placement",
            "run_dir",
            "keys",
            "payload",
            "log_level",
            "start_timeout_s",
            "attach_timeout_ms",
            "max_restarts",
            "restart_window_s",
            "insecure",
            "ssh",
            "address",
            "port_base"};
}

/// Files that a service writes: two servers would take them from each other.
Status check_own_files(const fs::path& file, const std::vector<StageSpec>& stages) {
    for (const char* key : {"disk_cache", "trace", "warm_file"}) {
        std::set<std::string> seen;
        for (const StageSpec& stage : stages) {
            const ServiceSetting* setting = stage.find(key);
            if (setting == nullptr || setting->values.empty() ||
                seen.insert(setting->values.front()).second)
                continue;
            return Error{
                ErrorCode::invalid_argument,
                fmt::format("{}:{}: '{}' is not the only server with {} = '{}'", file.string(),
                            stage.line, stage.name, key, setting->values.front()),
                "write [[experts]] for each server, and give each its own"};
        }
    }
    return Status::ok();
}

/// With a placement every server started here takes its share from that file.
Status complete_placed(const fs::path& file, const fs::path& placement,
                       std::vector<StageSpec>* stages) {
    for (StageSpec& stage : *stages) {
        if (stage.find("share") != nullptr)
            return Error{ErrorCode::invalid_argument,
                         fmt::format("{}:{}: '{}' has a share, and [pipeline] a placement",
                                     file.string(), stage.line, stage.name),
                         "remove one of the two"};
        if (!stage.attached())
            stage.settings.push_back({"share", {model::share_in_file(placement, stage.name)}});
    }
    return Status::ok();
}

/// Names and default shares, once all stages of a kind are known.
Status complete_kind(const fs::path& file, ServiceKind kind, const fs::path& placement,
                     std::vector<StageSpec>* stages) {
    std::size_t with_share = 0;
    for (const StageSpec& stage : *stages)
        if (stage.find("share") != nullptr || stage.attached()) ++with_share;
    std::size_t n = stages->size();
    for (std::size_t i = 0; i < n; ++i)
        if (StageSpec& stage = (*stages)[i]; stage.name.empty())
            stage.name =
                n == 1 ? std::string(to_string(kind)) : fmt::format("{}-{}", to_string(kind), i);
    if (kind == ServiceKind::experts && !placement.empty())
        RETURN_IF_ERROR(complete_placed(file, placement, stages));
    for (std::size_t i = 0; i < n; ++i) {
        StageSpec& stage = (*stages)[i];
        if (kind != ServiceKind::experts || stage.attached() || stage.find("share") != nullptr)
            continue;
        if (with_share > 0)
            return Error{ErrorCode::invalid_argument,
                         fmt::format("{}:{}: [[experts]] '{}' has no share while {} of the {} "
                                     "servers have one or are attached",
                                     file.string(), stage.line, stage.name, with_share, n),
                         "give a share to every server started here, or to none"};
        stage.settings.push_back(
            {"share", {n == 1 ? std::string("all") : fmt::format("{}/{}", i, n)}});
    }
    return check_own_files(file, *stages);
}

Result<std::vector<StageSpec>> read_kind(const fs::path& file, const toml::table& root,
                                         ServiceKind kind, const fs::path& placement) {
    std::vector<StageSpec> stages;
    std::string word(to_string(kind));
    auto add = [&](const toml::table& table, const std::string& heading) -> Status {
        StageSpec stage;
        std::int64_t count = 1;
        RETURN_IF_ERROR(read_stage(file, table, kind, heading, &stage, &count));
        if (count > 1 && !stage.name.empty() && kind == ServiceKind::experts)
            stage.name.clear();  // copies are numbered
        for (std::int64_t i = 0; i < count; ++i) stages.push_back(stage);
        return Status::ok();
    };
    const toml::node* node = root.get(word);
    bool several = kind == ServiceKind::trunk || kind == ServiceKind::experts;
    if (node == nullptr) {
        StageSpec stage;
        stage.kind = kind;
        stages.push_back(std::move(stage));
    } else if (const auto* table = node->as_table()) {
        RETURN_IF_ERROR(add(*table, fmt::format("[{}]", word)));
    } else if (const auto* list = node->as_array(); list != nullptr && several && !list->empty() &&
                                                    list->is_homogeneous<toml::table>()) {
        for (const toml::node& item : *list)
            RETURN_IF_ERROR(add(*item.as_table(), fmt::format("[[{}]]", word)));
    } else {
        return Error{ErrorCode::invalid_argument,
                     fmt::format("{}:{}: {} must be a table", file.string(),
                                 node->source().begin.line, word),
                     several
                         ? fmt::format("write [{0}] for one, or [[{0}]] for each of several", word)
                         : fmt::format("write [{}] once", word)};
    }
    RETURN_IF_ERROR(complete_kind(file, kind, placement, &stages));
    return stages;
}

Status read_ssh(TomlTable& reader, const toml::table& table, std::vector<std::string>* ssh) {
    std::string text = "ssh";
    RETURN_IF_ERROR(reader.text("ssh", &text));
    auto words = split_words(text);
    if (words.has_value() && words->empty())
        words = Error{ErrorCode::invalid_argument, "it is empty", "leave it out, or name a client"};
    if (!words.has_value())
        return reader.wrong(*table.get("ssh"),
                            fmt::format("[pipeline] ssh: {}", words.error().message),
                            words.error().remedy);
    *ssh = *std::move(words);
    return Status::ok();
}

Status read_host(const fs::path& file, const std::string& name, const toml::node& node,
                 HostSpec* host) {
    const auto* table = node.as_table();
    host->name = name;
    host->line = static_cast<std::uint32_t>(node.source().begin.line);
    if (table == nullptr)
        return Error{
            ErrorCode::invalid_argument,
            fmt::format("{}:{}: hosts.{} must be a table", file.string(), host->line, name),
            fmt::format("write [hosts.\"{}\"]", name)};
    TomlTable reader(file, *table, fmt::format("[hosts.\"{}\"]", name));
    RETURN_IF_ERROR(reader.text("address", &host->address));
    std::string model;
    RETURN_IF_ERROR(reader.text("model", &model));
    host->model = model;
    RETURN_IF_ERROR(reader.text("binary", &host->binary));
    // A bare name of a program is looked for in PATH there.
    const bool bare = host->binary.find('/') == std::string::npos;
    for (const auto& [key, path] : {std::pair<const char*, std::string>{"model", model},
                                    {"binary", bare ? "" : host->binary}})
        if (!path.empty() && path.front() != '/')
            return reader.wrong(
                *table->get(key),
                fmt::format("{} {} = '{}' is not an absolute path", reader.heading(), key, path),
                "write where it is on that box, from /");
    const std::vector<std::string> known = {"address", "model", "binary"};
    if (auto rest = reader.rest(); !rest.empty())
        return reader.wrong(*rest.front().second,
                            fmt::format("{} has no key '{}'", reader.heading(), rest.front().first),
                            suggestion(rest.front().first, known,
                                       fmt::format("known: {}", fmt::join(known, ", "))));
    return Status::ok();
}

/// The tables, and what only stages name.
Status read_hosts(const toml::table& root, PipelineSpec* spec) {
    if (const toml::node* node = root.get("hosts"); node != nullptr) {
        const auto* hosts = node->as_table();
        if (hosts == nullptr)
            return Error{ErrorCode::invalid_argument,
                         fmt::format("{}:{}: hosts must be a table", spec->file.string(),
                                     node->source().begin.line),
                         "write [hosts.NAME] for each box"};
        for (const auto& [key, value] : *hosts) {
            HostSpec host;
            RETURN_IF_ERROR(read_host(spec->file, std::string(key.str()), value, &host));
            spec->hosts.push_back(std::move(host));
        }
    }
    const bool is_dealt = root.contains("slurm");  // nodes are given their stages later
    std::vector<std::string> used;
    for (const StageSpec& stage : spec->stages)
        if (!stage.host.empty()) used.push_back(stage.host);
    for (const HostSpec& host : spec->hosts)
        if (!is_dealt && std::find(used.begin(), used.end(), host.name) == used.end())
            return Error{ErrorCode::invalid_argument,
                         fmt::format("{}:{}: no stage has host = '{}'", spec->file.string(),
                                     host.line, host.name),
                         suggestion(host.name, used,
                                    used.empty() ? "give a stage that host, or remove the table"
                                                 : fmt::format("hosts of stages: {}",
                                                               fmt::join(used, ", ")))};
    for (const StageSpec& stage : spec->stages)
        if (!stage.host.empty() && spec->host_of(stage) == nullptr)
            spec->hosts.emplace_back().name = stage.host;
    return Status::ok();
}

Status read_pipeline_table(const toml::table& root, PipelineSpec* spec) {
    const toml::node* node = root.get("pipeline");
    const auto* table = node == nullptr ? nullptr : node->as_table();
    if (table == nullptr)
        return Error{ErrorCode::invalid_argument,
                     fmt::format("{}: there is no [pipeline] table", spec->file.string()),
                     "begin the file with [pipeline] and model = \"DIRECTORY\""};
    TomlTable reader(spec->file, *table, "[pipeline]");
    spec->name = spec->file.stem().string();
    RETURN_IF_ERROR(reader.text("name", &spec->name));
    if (!is_legal_name(spec->name))
        return reader.wrong(table->contains("name") ? *table->get("name") : *table,
                            fmt::format("'{}' is not a legal pipeline name", spec->name),
                            "set name in [pipeline]: letters, digits, - and _, at most 40");
    RETURN_IF_ERROR(reader.path("model", &spec->model));
    RETURN_IF_ERROR(reader.path("placement", &spec->placement));
    RETURN_IF_ERROR(reader.path("run_dir", &spec->run_dir));
    RETURN_IF_ERROR(reader.path("keys", &spec->keys));
    RETURN_IF_ERROR(reader.choice("payload", {"shm", "inline"}, &spec->payload));
    RETURN_IF_ERROR(
        reader.choice("log_level", {"debug", "info", "warn", "error"}, &spec->log_level));
    RETURN_IF_ERROR(reader.integer("start_timeout_s", 1, 86400, &spec->start_timeout_s));
    RETURN_IF_ERROR(reader.integer("attach_timeout_ms", 100, 3600000, &spec->attach_timeout_ms));
    RETURN_IF_ERROR(reader.integer("max_restarts", 0, 1000, &spec->max_restarts));
    RETURN_IF_ERROR(reader.integer("restart_window_s", 1, 86400, &spec->restart_window_s));
    RETURN_IF_ERROR(reader.flag("insecure", &spec->insecure));
    RETURN_IF_ERROR(read_ssh(reader, *table, &spec->ssh));
    RETURN_IF_ERROR(reader.text("address", &spec->address));
    RETURN_IF_ERROR(reader.integer("port_base", 1024, 65000, &spec->port_base));
    if (auto rest = reader.rest(); !rest.empty()) {
        return reader.wrong(*rest.front().second,
                            fmt::format("[pipeline] has no key '{}'", rest.front().first),
                            suggestion(rest.front().first, pipeline_keys(),
                                       fmt::format("known: {}", fmt::join(pipeline_keys(), ", "))));
    }
    return Status::ok();
}

Status read_slurm(const toml::table& root, PipelineSpec* spec) {
    const toml::node* node = root.get("slurm");
    if (node == nullptr) return Status::ok();
    SlurmSpec& slurm = spec->slurm;
    slurm.line = static_cast<std::uint32_t>(node->source().begin.line);
    const auto* table = node->as_table();
    if (table == nullptr)
        return Error{ErrorCode::invalid_argument,
                     fmt::format("{}:{}: slurm must be a table", spec->file.string(), slurm.line),
                     "write [slurm]"};
    TomlTable reader(spec->file, *table, "[slurm]");
    RETURN_IF_ERROR(reader.integer("nodes", 1, 4096, &slurm.nodes));
    RETURN_IF_ERROR(reader.integer("cpus", 1, 4096, &slurm.cpus));
    RETURN_IF_ERROR(reader.text("mem", &slurm.mem));
    RETURN_IF_ERROR(reader.text("partition", &slurm.partition));
    RETURN_IF_ERROR(reader.text("account", &slurm.account));
    RETURN_IF_ERROR(reader.text("qos", &slurm.qos));
    RETURN_IF_ERROR(reader.text("time", &slurm.time));
    std::string extra;
    RETURN_IF_ERROR(reader.text("extra", &extra));
    auto words = split_words(extra);
    if (words.has_value() && !words->empty() && !words->front().starts_with('-'))
        words = Error{ErrorCode::invalid_argument,
                      fmt::format("'{}' is no option of salloc", words->front()),
                      "write options: \"--constraint=avx512\""};
    if (!words.has_value())
        return reader.wrong(*table->get("extra"),
                            fmt::format("[slurm] extra: {}", words.error().message),
                            words.error().remedy);
    slurm.extra = *std::move(words);
    const std::vector<std::string> known = {"nodes",   "cpus", "mem",  "partition",
                                            "account", "qos",  "time", "extra"};
    if (auto rest = reader.rest(); !rest.empty())
        return reader.wrong(*rest.front().second,
                            fmt::format("[slurm] has no key '{}'", rest.front().first),
                            suggestion(rest.front().first, known,
                                       fmt::format("known: {}", fmt::join(known, ", "))));
    return Status::ok();
}

Status check_tables(const fs::path& file, const toml::table& root) {
    std::vector<std::string> known = {"pipeline", "hosts", "slurm"};
    for (ServiceKind kind : kKinds) known.emplace_back(to_string(kind));
    for (const auto& [key, node] : root) {
        std::string word(key.str());
        if (std::find(known.begin(), known.end(), word) != known.end()) continue;
        return Error{
            ErrorCode::invalid_argument,
            fmt::format("{}:{}: unknown {} [{}]", file.string(), node.source().begin.line,
                        node.is_table() || node.is_array_of_tables() ? "table" : "key", word),
            suggestion(word, known, fmt::format("known tables: {}", fmt::join(known, ", ")))};
    }
    return Status::ok();
}

Status check_unique_names(const PipelineSpec& spec) {
    std::set<std::string> seen;
    for (const StageSpec& stage : spec.stages)
        if (!seen.insert(stage.name).second)
            return Error{ErrorCode::invalid_argument,
                         fmt::format("{}:{}: two stages are called '{}'", spec.file.string(),
                                     stage.line, stage.name),
                         "give each its own name"};
    return Status::ok();
}

}  // namespace

const ServiceSetting* StageSpec::find(std::string_view setting) const noexcept {
    for (const ServiceSetting& candidate : settings)
        if (candidate.name == setting) return &candidate;
    return nullptr;
}

std::vector<const StageSpec*> PipelineSpec::of_kind(ServiceKind kind) const {
    std::vector<const StageSpec*> found;
    for (const StageSpec& stage : stages)
        if (stage.kind == kind) found.push_back(&stage);
    return found;
}

const HostSpec* PipelineSpec::host_of(const StageSpec& stage) const noexcept {
    for (const HostSpec& host : hosts)
        if (host.name == stage.host) return &host;
    return nullptr;
}

bool PipelineSpec::has_remote() const noexcept {
    return std::any_of(stages.begin(), stages.end(), [](const StageSpec& stage) {
        return !stage.host.empty() && !stage.attached();
    });
}

Result<PipelineSpec> parse_pipeline(std::string_view text, const fs::path& file) {
    toml::table root;
    try {
        root = toml::parse(text, file.string());
    } catch (const toml::parse_error& e) {
        return Error{
            ErrorCode::invalid_argument,
            fmt::format("{}:{}: {}", file.string(), e.source().begin.line, e.description()),
            "correct the TOML syntax"};
    }
    PipelineSpec spec;
    spec.file = file;
    RETURN_IF_ERROR(check_tables(file, root));
    RETURN_IF_ERROR(read_pipeline_table(root, &spec));
    for (ServiceKind kind : kKinds) {
        ASSIGN_OR_RETURN(std::vector<StageSpec> stages,
                         read_kind(file, root, kind, spec.placement));
        std::move(stages.begin(), stages.end(), std::back_inserter(spec.stages));
    }
    RETURN_IF_ERROR(read_hosts(root, &spec));
    RETURN_IF_ERROR(read_slurm(root, &spec));
    RETURN_IF_ERROR(check_unique_names(spec));
    return spec;
}

Result<PipelineSpec> load_pipeline(const fs::path& file) {
    std::error_code code;
    fs::path absolute = fs::absolute(file, code);
    if (!fs::exists(absolute, code))
        return Error{ErrorCode::invalid_argument,
                     fmt::format("pipeline file {} does not exist", file.string()),
                     "check the path given to -c; configs/ has examples"};
    if (fs::is_directory(absolute, code))
        return Error{ErrorCode::invalid_argument,
                     fmt::format("pipeline file {} is a directory", file.string()),
                     "give the .toml file itself to -c"};
    errno = 0;
    std::ifstream stream(absolute, std::ios::binary);
    if (!stream)
        return Error{
            ErrorCode::invalid_argument,
            fmt::format("cannot read pipeline file {}: {}", file.string(), std::strerror(errno)),
            "check its permissions"};
    std::string text(std::istreambuf_iterator<char>(stream), {});
    return parse_pipeline(text, absolute.lexically_normal());
}

}  // namespace k3::launcher
