#include "launcher/stage_table.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <sstream>
#include <utility>
#include <vector>

#include "common/base/settings.h"
#include "common/transport/endpoint.h"
#include "launcher/words.h"

namespace k3::launcher {

namespace fs = std::filesystem;
using msg::ServiceKind;

namespace {

// What the launcher itself gives to every service; a file that names them would be overruled.
constexpr std::array<std::string_view, 6> kReservedSettings = {
    "run_id", "lifeline_fd", "experts", "tokenizer", "trunk", "sampler"};

// Settings of services that name files: relative to the pipeline file, as every path in it.
constexpr std::array<std::string_view, 4> kPathSettings = {"disk_cache", "pack", "trace",
                                                           "warm_file"};

Result<std::string> setting_text(const TomlTable& reader, const std::string& key,
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

Status read_settings(const TomlTable& reader, std::vector<ServiceSetting>* settings) {
    for (const auto& [key, node] : reader.rest()) {
        if (std::find(kReservedSettings.begin(), kReservedSettings.end(), key) !=
            kReservedSettings.end())
            return reader.wrong(*node,
                                fmt::format("{} {} is set by the launcher", reader.heading(), key),
                                "remove it; endpoints of other stages follow from their tables");
        if (key == "keys")
            return reader.wrong(*node, fmt::format("{} keys is for the pipeline", reader.heading()),
                                "write keys = \"FILE\" in [pipeline]: all stages share them");
        if (key == "help" || key == "version" || key == "config" || key == "check")
            return reader.wrong(*node, fmt::format("{} {} is not a setting", reader.heading(), key),
                                "settings of a stage stand in its table");
        ServiceSetting setting{key, {}};
        const bool is_path =
            std::find(kPathSettings.begin(), kPathSettings.end(), key) != kPathSettings.end();
        if (const auto* on = node->as_boolean()) {
            if (!on->get()) continue;  // false is the absence of a flag
        } else if (const auto* list = node->as_array()) {
            if (list->empty())
                return reader.wrong(*node,
                                    fmt::format("{} {} is an empty list", reader.heading(), key),
                                    "put something into it, or remove it");
            for (const toml::node& item : *list) {
                ASSIGN_OR_RETURN(std::string value, setting_text(reader, key, item));
                if (is_path && !value.empty()) value = reader.resolve(value).string();
                setting.values.push_back(std::move(value));
            }
        } else {
            ASSIGN_OR_RETURN(std::string value, setting_text(reader, key, *node));
            if (is_path && !value.empty()) value = reader.resolve(value).string();
            if (key == "share" && value.starts_with('@'))  // a placement file
                value = "@" + reader.resolve(value.substr(1)).string();
            setting.values.push_back(std::move(value));
        }
        // Only of session_dir does "" say something: that no session is kept.
        const bool is_empty = std::any_of(setting.values.begin(), setting.values.end(),
                                          [](const std::string& value) { return value.empty(); });
        if (is_empty && key != "session_dir")
            return reader.wrong(*node, fmt::format("{} {} is empty", reader.heading(), key),
                                "give it a value, or remove it");
        settings->push_back(std::move(setting));
    }
    return Status::ok();
}

Status read_env(TomlTable& reader, StageSpec* stage) {
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

Status read_rate(TomlTable& reader, std::string_view key, std::uint64_t* value) {
    const toml::node* node = reader.take(key);
    if (node == nullptr) return Status::ok();
    ASSIGN_OR_RETURN(const std::string text, setting_text(reader, std::string(key), *node));
    const auto bytes = parse_bytes(text);
    if (!bytes.has_value() || *bytes == 0)
        return reader.wrong(*node,
                            fmt::format("{} {} = '{}' is no rate", reader.heading(), key, text),
                            "write bytes per second: \"3GB\"");
    *value = *bytes;
    return Status::ok();
}

Status read_box(TomlTable& reader, BoxFigures* box) {
    RETURN_IF_ERROR(read_rate(reader, "disk_rate", &box->disk_rate));
    RETURN_IF_ERROR(read_rate(reader, "memory_rate", &box->memory_rate));
    RETURN_IF_ERROR(read_rate(reader, "link_rate", &box->link_rate));
    return reader.integer("round_trip_us", 0, 10'000'000, &box->round_trip_us);
}

Status check_endpoint(const TomlTable& reader, const toml::table& table, std::string_view key,
                      const std::string& value) {
    if (value.empty()) return Status::ok();
    auto parsed = transport::parse_endpoint(value);
    if (!parsed.has_value())
        return reader.wrong(*table.get(key),
                            fmt::format("{} {}: {}", reader.heading(), key, parsed.error().message),
                            parsed.error().remedy);
    if (parsed->kind == transport::Endpoint::Kind::ipc && !parsed->path.starts_with('/'))
        return reader.wrong(*table.get(key),
                            fmt::format("{} {} = '{}' is a socket in whatever folder a process "
                                        "happens to run in",
                                        reader.heading(), key, value),
                            "write its path from the root: ipc:///folder/name.sock");
    if (parsed->port == "*" || parsed->port == "0")
        return reader.wrong(*table.get(key),
                            fmt::format("{} {} = '{}' names no port that others could be told",
                                        reader.heading(), key, value),
                            "choose a port number");
    return Status::ok();
}

bool is_terminal_tool(const std::vector<std::string>& wrap) {
    if (wrap.empty()) return false;
    std::string program = fs::path(wrap.front()).filename().string();
    return program == "gdb" || program == "lldb" || program == "cgdb" || program == "rr";
}

/// What a stage of another box may have: no terminal, no file of this box.
Status check_host(const TomlTable& reader, const toml::table& table, const StageSpec& stage) {
    if (stage.host.empty()) return Status::ok();
    const toml::node& at = *table.get("host");
    if (stage.host.front() == '-' || stage.host.find_first_of(" \t\n") != std::string::npos)
        return reader.wrong(
            at, fmt::format("{} host = '{}' is no box", reader.heading(), stage.host),
            "write what you would give to ssh: \"user@box\", or a name of its settings");
    if (stage.terminal)
        return reader.wrong(at,
                            fmt::format("{} wants the terminal, and it is started on {}",
                                        reader.heading(), stage.host),
                            "start it there by hand, and give its endpoint here");
    if (stage.listen.starts_with("ipc://"))
        return reader.wrong(*table.get("listen"),
                            fmt::format("{} listen = '{}' can only be reached on {} itself",
                                        reader.heading(), stage.listen, stage.host),
                            "leave listen out, or write tcp://address:port");
    std::vector<std::string> keys(kPathSettings.begin(), kPathSettings.end());
    keys.insert(keys.end(), {"model", "session_dir"});
    if (stage.binary.find('/') != std::string::npos) keys.emplace_back("binary");
    if (!stage.wrap.empty() && stage.wrap.front().find('/') != std::string::npos)
        keys.emplace_back("wrap");
    for (const std::string& key : keys) {
        const toml::node* node = table.get(key);
        const auto* text = node == nullptr ? nullptr : node->as_string();
        if (text == nullptr || text->get().empty() || text->get().front() == '/') continue;
        return reader.wrong(*node,
                            fmt::format("{} {} = '{}' is a path on {} and not an absolute one",
                                        reader.heading(), key, text->get(), stage.host),
                            "write where it is on that box, from /");
    }
    return Status::ok();
}

}  // namespace

Status read_stage(const fs::path& file, const toml::table& table, ServiceKind kind,
                  std::string heading, StageSpec* stage, std::int64_t* count) {
    TomlTable reader(file, table, std::move(heading));
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
    RETURN_IF_ERROR(reader.text("host", &stage->host));
    std::string wrap;
    RETURN_IF_ERROR(reader.text("wrap", &wrap));
    auto words = split_words(wrap);
    if (!words)
        return reader.wrong(*table.get("wrap"),
                            fmt::format("{} wrap: {}", reader.heading(), words.error().message),
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
    bool several = kind == ServiceKind::experts || kind == ServiceKind::trunk;
    if (const toml::node* node = table.get("count"); node != nullptr && !several)
        return reader.wrong(
            *node,
            fmt::format("{} count: a pipeline has one {}", reader.heading(), to_string(kind)),
            "remove it; trunk and experts may have a count");
    RETURN_IF_ERROR(reader.integer("count", 1, 256, count));
    if (several) RETURN_IF_ERROR(read_box(reader, &stage->box));
    if (kind == ServiceKind::experts)
        RETURN_IF_ERROR(reader.integer("weight", 1, msg::kMaxExpertWeight, &stage->weight));
    RETURN_IF_ERROR(read_settings(reader, &stage->settings));
    if (stage->weight > 0 && !stage->attached())  // an attached one announces its own
        stage->settings.push_back({"weight", {std::to_string(stage->weight)}});
    for (ServiceSetting& setting : stage->settings)  // a path like those of the launcher's own keys
        if (setting.name == "session_dir")
            for (std::string& path : setting.values)
                if (!path.empty()) path = reader.resolve(path).string();
    RETURN_IF_ERROR(check_host(reader, table, *stage));
    bool owned_key = !stage->binary.empty() || !stage->host.empty() || !stage->wrap.empty() ||
                     !stage->listen.empty() || !stage->env.empty() || *count != 1 ||
                     !stage->settings.empty() || table.contains("restart") ||
                     table.contains("terminal");
    if (stage->attached() && owned_key)
        return reader.wrong(
            *table.get("endpoint"),
            fmt::format("{} has an endpoint, so that process is not started here, and its other "
                        "settings would have no effect",
                        reader.heading()),
            "remove the endpoint, or everything but the endpoint and name");
    return Status::ok();
}

}  // namespace k3::launcher
