#include "launcher/pipeline_file.h"

#include <fmt/format.h>

#include <toml++/toml.h>
#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <fstream>
#include <iterator>
#include <set>
#include <sstream>
#include <tuple>

#include "common/base/settings.h"

namespace k3::launcher {

namespace fs = std::filesystem;
using msg::ServiceKind;

namespace {

// In the order in which stages are listed, started and shown.
constexpr std::array kKinds = {ServiceKind::tokenizer, ServiceKind::sampler, ServiceKind::experts,
                               ServiceKind::trunk, ServiceKind::gateway};

// What the launcher itself gives to every service; a file that names them would be overruled.
const std::vector<std::string> kReservedSettings = {"run_id",    "lifeline_fd", "experts",
                                                    "tokenizer", "trunk",       "sampler"};

/// Reads one table, remembering where it stands for every sentence.
class Reader {
  public:
    Reader(const fs::path& file, const toml::table& table, std::string heading)
        : file_(file), table_(table), heading_(std::move(heading)) {}

    Error wrong(const toml::node& at, std::string_view what, std::string remedy) const {
        return Error{ErrorCode::invalid_argument,
                     fmt::format("{}:{}: {}", file_.string(), at.source().begin.line, what),
                     std::move(remedy)};
    }

    Status text(std::string_view key, std::string* value) {
        const toml::node* node = take(key);
        if (node == nullptr) return Status::ok();
        const auto* found = node->as_string();
        if (found == nullptr)
            return wrong(*node, fmt::format("{} {} must be a string", heading_, key),
                         "write it in quotes");
        *value = found->get();
        return Status::ok();
    }

    Status path(std::string_view key, fs::path* value) {
        std::string found;
        RETURN_IF_ERROR(text(key, &found));
        if (!found.empty()) *value = resolve(found);
        return Status::ok();
    }

    Status integer(std::string_view key, std::int64_t min, std::int64_t max, std::int64_t* value) {
        const toml::node* node = take(key);
        if (node == nullptr) return Status::ok();
        const auto* found = node->as_integer();
        if (found == nullptr || found->get() < min || found->get() > max)
            return wrong(
                *node,
                fmt::format("{} {} must be a whole number from {} to {}", heading_, key, min, max),
                "write a number in that range");
        *value = found->get();
        return Status::ok();
    }

    Status flag(std::string_view key, bool* value) {
        const toml::node* node = take(key);
        if (node == nullptr) return Status::ok();
        const auto* found = node->as_boolean();
        if (found == nullptr)
            return wrong(*node, fmt::format("{} {} must be true or false", heading_, key),
                         "write true or false without quotes");
        *value = found->get();
        return Status::ok();
    }

    Status choice(std::string_view key, const std::vector<std::string>& choices,
                  std::string* value) {
        const toml::node* node = table_.get(key);
        RETURN_IF_ERROR(text(key, value));
        if (node == nullptr || std::find(choices.begin(), choices.end(), *value) != choices.end())
            return Status::ok();
        return wrong(*node,
                     fmt::format("{} {} = '{}' is not one of {}", heading_, key, *value,
                                 fmt::join(choices, ", ")),
                     suggestion(*value, choices, "choose one of them"));
    }

    const toml::node* take(std::string_view key) {
        taken_.insert(std::string(key));
        return table_.get(key);
    }

    /// Keys nobody took, in the order of the file.
    std::vector<std::pair<std::string, const toml::node*>> rest() const {
        std::vector<std::pair<std::string, const toml::node*>> found;
        for (const auto& [key, node] : table_)
            if (!taken_.contains(std::string(key.str()))) found.emplace_back(key.str(), &node);
        std::stable_sort(found.begin(), found.end(), [](const auto& a, const auto& b) {
            const auto& x = a.second->source().begin;
            const auto& y = b.second->source().begin;
            return std::tie(x.line, x.column) < std::tie(y.line, y.column);
        });
        return found;
    }

    static std::string suggestion(std::string_view word, const std::vector<std::string>& known,
                                  std::string otherwise) {
        std::string nearest = nearest_name(word, known);
        return nearest.empty() ? otherwise : fmt::format("did you mean {}?", nearest);
    }

    fs::path resolve(const std::string& text) const {
        fs::path path = (file_.parent_path() / text).lexically_normal();
        return path.has_filename() ? path : path.parent_path();  // "models/demo/" as "models/demo"
    }
    const std::string& heading() const noexcept { return heading_; }

  private:
    const fs::path& file_;
    const toml::table& table_;
    std::string heading_;
    std::set<std::string> taken_;
};

Result<std::string> setting_text(const Reader& reader, const std::string& key,
                                 const toml::node& node) {
    if (const auto* text = node.as_string()) return text->get();
    if (node.is_integer() || node.is_floating_point()) {
        std::ostringstream out;
        out << toml::node_view<const toml::node>(node);
        return out.str();
    }
    return reader.wrong(node,
                        fmt::format("{} {} must be text, a number, true, false or a list of these",
                                    reader.heading(), key),
                        "a setting of a service is one flag of its command line");
}

Status read_settings(const Reader& reader, std::vector<ServiceSetting>* settings) {
    for (const auto& [key, node] : reader.rest()) {
        if (std::find(kReservedSettings.begin(), kReservedSettings.end(), key) !=
            kReservedSettings.end())
            return reader.wrong(*node,
                                fmt::format("{} {} is set by the launcher", reader.heading(), key),
                                "remove it; endpoints of other stages follow from their tables");
        ServiceSetting setting{key, {}};
        if (const auto* on = node->as_boolean()) {
            if (!on->get()) continue;  // false is the absence of a flag
        } else if (const auto* list = node->as_array()) {
            for (const toml::node& item : *list) {
                ASSIGN_OR_RETURN(std::string value, setting_text(reader, key, item));
                setting.values.push_back(std::move(value));
            }
        } else {
            ASSIGN_OR_RETURN(std::string value, setting_text(reader, key, *node));
            setting.values.push_back(std::move(value));
        }
        settings->push_back(std::move(setting));
    }
    return Status::ok();
}

Status read_env(Reader& reader, StageSpec* stage) {
    const toml::node* node = reader.take("env");
    if (node == nullptr) return Status::ok();
    const auto* table = node->as_table();
    if (table == nullptr)
        return reader.wrong(*node, fmt::format("{} env must be a table", reader.heading()),
                            "write env = { NAME = \"value\" }");
    for (const auto& [key, value] : *table) {
        ASSIGN_OR_RETURN(std::string text, setting_text(reader, "env", value));
        stage->env.emplace_back(std::string(key.str()), std::move(text));
    }
    return Status::ok();
}

Status check_endpoint(const Reader& reader, const toml::table& table, std::string_view key,
                      const std::string& value) {
    if (value.empty() || value.starts_with("ipc://") || value.starts_with("tcp://"))
        return Status::ok();
    return reader.wrong(
        *table.get(key),
        fmt::format("{} {} = '{}' is not an endpoint", reader.heading(), key, value),
        "write ipc:///path/of/socket or tcp://address:port");
}

bool is_terminal_tool(const std::vector<std::string>& wrap) {
    if (wrap.empty()) return false;
    std::string program = fs::path(wrap.front()).filename().string();
    return program == "gdb" || program == "lldb" || program == "cgdb" || program == "rr";
}

/// One table of a stage; `count` copies of it are asked for.
Status read_stage(const fs::path& file, const toml::table& table, ServiceKind kind,
                  std::string heading, StageSpec* stage, std::int64_t* count) {
    Reader reader(file, table, std::move(heading));
    stage->kind = kind;
    stage->line = static_cast<std::uint32_t>(table.source().begin.line);
    RETURN_IF_ERROR(reader.text("name", &stage->name));
    if (!stage->name.empty() && !is_legal_name(stage->name))
        return reader.wrong(
            *table.get("name"),
            fmt::format("{} name = '{}' is not a legal name", reader.heading(), stage->name),
            "use letters, digits, - and _, at most 40");
    RETURN_IF_ERROR(reader.text("binary", &stage->binary));
    if (stage->binary.find('/') != std::string::npos)
        stage->binary = reader.resolve(stage->binary).string();
    RETURN_IF_ERROR(reader.text("endpoint", &stage->endpoint));
    RETURN_IF_ERROR(check_endpoint(reader, table, "endpoint", stage->endpoint));
    RETURN_IF_ERROR(reader.text("listen", &stage->listen));
    RETURN_IF_ERROR(check_endpoint(reader, table, "listen", stage->listen));
    RETURN_IF_ERROR(reader.path("model", &stage->model));
    std::string wrap;
    RETURN_IF_ERROR(reader.text("wrap", &wrap));
    auto words = split_words(wrap);
    if (!words)
        return reader.wrong(*table.get("wrap"),
                            reader.heading() + " wrap: " + words.error().message,
                            words.error().remedy);
    stage->wrap = *words;
    if (!stage->wrap.empty() && stage->wrap.front().find('/') != std::string::npos)
        stage->wrap.front() = reader.resolve(stage->wrap.front()).string();
    stage->terminal = is_terminal_tool(stage->wrap);
    RETURN_IF_ERROR(reader.flag("terminal", &stage->terminal));
    std::string restart = "on-failure";
    RETURN_IF_ERROR(reader.choice("restart", {"on-failure", "never"}, &restart));
    stage->restart = restart == "never" ? RestartPolicy::never : RestartPolicy::on_failure;
    RETURN_IF_ERROR(read_env(reader, stage));
    *count = 1;
    if (kind == ServiceKind::experts || kind == ServiceKind::trunk)
        RETURN_IF_ERROR(reader.integer("count", 1, 256, count));
    RETURN_IF_ERROR(read_settings(reader, &stage->settings));
    bool owned_key = !stage->binary.empty() || !stage->wrap.empty() || !stage->listen.empty() ||
                     *count != 1 || !stage->settings.empty();
    if (stage->attached() && owned_key)
        return reader.wrong(
            *table.get("endpoint"),
            fmt::format("{} has an endpoint, so that process is not started here, and its other "
                        "settings would have no effect",
                        reader.heading()),
            "remove the endpoint, or everything but the endpoint and name");
    return Status::ok();
}

/// Names and default shares, once all stages of a kind are known.
Status complete_kind(const fs::path& file, ServiceKind kind, std::vector<StageSpec>* stages) {
    std::size_t with_share = 0;
    for (const StageSpec& stage : *stages)
        if (stage.find("share") != nullptr || stage.attached()) ++with_share;
    std::size_t n = stages->size();
    for (std::size_t i = 0; i < n; ++i) {
        StageSpec& stage = (*stages)[i];
        if (stage.name.empty())
            stage.name =
                n == 1 ? std::string(to_string(kind)) : fmt::format("{}-{}", to_string(kind), i);
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
    return Status::ok();
}

Result<std::vector<StageSpec>> read_kind(const fs::path& file, const toml::table& root,
                                         ServiceKind kind) {
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
    RETURN_IF_ERROR(complete_kind(file, kind, &stages));
    return stages;
}

Status read_pipeline_table(const toml::table& root, PipelineSpec* spec) {
    const toml::node* node = root.get("pipeline");
    const auto* table = node == nullptr ? nullptr : node->as_table();
    if (table == nullptr)
        return Error{ErrorCode::invalid_argument,
                     spec->file.string() + ": there is no [pipeline] table",
                     "begin the file with [pipeline] and model = \"DIRECTORY\""};
    Reader reader(spec->file, *table, "[pipeline]");
    spec->name = spec->file.stem().string();
    RETURN_IF_ERROR(reader.text("name", &spec->name));
    if (!is_legal_name(spec->name))
        return reader.wrong(*table, fmt::format("'{}' is not a legal pipeline name", spec->name),
                            "set name in [pipeline]: letters, digits, - and _, at most 40");
    RETURN_IF_ERROR(reader.path("model", &spec->model));
    RETURN_IF_ERROR(reader.path("run_dir", &spec->run_dir));
    RETURN_IF_ERROR(reader.choice("payload", {"shm", "inline"}, &spec->payload));
    RETURN_IF_ERROR(
        reader.choice("log_level", {"debug", "info", "warn", "error"}, &spec->log_level));
    RETURN_IF_ERROR(reader.integer("start_timeout_s", 1, 86400, &spec->start_timeout_s));
    RETURN_IF_ERROR(reader.integer("attach_timeout_ms", 100, 3600000, &spec->attach_timeout_ms));
    RETURN_IF_ERROR(reader.integer("max_restarts", 0, 1000, &spec->max_restarts));
    RETURN_IF_ERROR(reader.integer("restart_window_s", 1, 86400, &spec->restart_window_s));
    if (auto rest = reader.rest(); !rest.empty()) {
        static const std::vector<std::string> kKnown = {"name",
                                                        "model",
                                                        "run_dir",
                                                        "payload",
                                                        "log_level",
                                                        "start_timeout_s",
                                                        "attach_timeout_ms",
                                                        "max_restarts",
                                                        "restart_window_s"};
        return reader.wrong(
            *rest.front().second, fmt::format("[pipeline] has no key '{}'", rest.front().first),
            Reader::suggestion(rest.front().first, kKnown,
                               "known: " + fmt::format("{}", fmt::join(kKnown, ", "))));
    }
    return Status::ok();
}

Status check_tables(const fs::path& file, const toml::table& root) {
    std::vector<std::string> known = {"pipeline"};
    for (ServiceKind kind : kKinds) known.emplace_back(to_string(kind));
    for (const auto& [key, node] : root) {
        std::string word(key.str());
        if (std::find(known.begin(), known.end(), word) != known.end()) continue;
        return Error{
            ErrorCode::invalid_argument,
            fmt::format("{}:{}: unknown {} [{}]", file.string(), node.source().begin.line,
                        node.is_table() || node.is_array_of_tables() ? "table" : "key", word),
            Reader::suggestion(word, known,
                               fmt::format("known tables: {}", fmt::join(known, ", ")))};
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
        ASSIGN_OR_RETURN(std::vector<StageSpec> stages, read_kind(file, root, kind));
        std::move(stages.begin(), stages.end(), std::back_inserter(spec.stages));
    }
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
