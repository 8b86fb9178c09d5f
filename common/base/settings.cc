#include "common/base/settings.h"

#include <fmt/format.h>

#include <toml++/toml.h>
#include <CLI/CLI.hpp>
#include <algorithm>
#include <charconv>
#include <deque>
#include <fstream>
#include <functional>
#include <iostream>
#include <iterator>
#include <sstream>

namespace k3 {

namespace {

std::string flag_of(const std::string& name) {
    std::string flag = "--" + name;
    std::replace(flag.begin(), flag.end(), '_', '-');
    return flag;
}

Error invalid(std::string message, std::string remedy) {
    return Error{ErrorCode::invalid_argument, std::move(message), std::move(remedy)};
}

/// A TOML scalar as the text a flag would carry.
Result<std::string> text_of(const toml::node& node, const std::string& where) {
    if (node.is_table() || node.is_array())
        return invalid(
            fmt::format("{} is a {}", where, node.is_table() ? "table" : "list of lists"),
            "give a plain value");
    if (const auto* text = node.as_string()) return text->get();
    if (const auto* flag = node.as_boolean()) return std::string(flag->get() ? "true" : "false");
    std::ostringstream out;
    out << toml::node_view<const toml::node>(node);
    return out.str();
}

}  // namespace

struct Setting {
    std::string name;
    std::string help;
    std::string kind;  // "TEXT", "BYTES", ...; empty for a flag
    bool required = false;
    bool is_flag = false;
    bool is_list = false;
    // Takes one value; `where` is how the user gave it ("--threads", "threads in demo.toml").
    std::function<Status(const std::string& value, const std::string& where)> set;
    std::function<void()> clear;     // of a list: drops the default
    std::vector<std::string> given;  // on the command line, where it beats the file
    bool seen = false;
};

class Settings::Impl {
  public:
    std::string program;
    std::string summary;
    std::deque<Setting> settings;

    Setting& add(std::string name, std::string kind, std::string help) {
        Setting& setting = settings.emplace_back();
        setting.name = std::move(name);
        setting.kind = std::move(kind);
        setting.help = std::move(help);
        return setting;
    }

    Status unknown(const std::string& word, const std::string& where, bool as_flag) const {
        std::vector<std::string> names;
        for (const Setting& setting : settings)
            names.push_back(as_flag ? flag_of(setting.name) : setting.name);
        if (as_flag) names.insert(names.end(), {"--config", "--help", "--version"});
        std::string nearest = nearest_name(word, names);
        return invalid(fmt::format("unknown setting {}{}", word, where),
                       nearest.empty() ? fmt::format("see {} --help", program)
                                       : fmt::format("did you mean {}?", nearest));
    }

    Status read_file(const std::string& path) {
        std::string text;
        try {
            std::ifstream file;
            if (path != "-") file.open(path);
            if (!file) throw std::ios_base::failure("cannot open");
            text.assign(std::istreambuf_iterator<char>(path == "-" ? std::cin : file), {});
        } catch (const std::ios_base::failure&) {  // reading a directory throws, too
            return invalid(fmt::format("cannot read settings file {}", path),
                           "check the path given to --config");
        }
        try {
            const toml::table table = toml::parse(text, path);
            for (const auto& [key, node] : table)
                RETURN_IF_ERROR(set_from_file(std::string(key.str()), node, path));
        } catch (const toml::parse_error& e) {
            return invalid(fmt::format("{}:{}: {}", path, e.source().begin.line, e.description()),
                           "correct the TOML syntax");
        }
        return Status::ok();
    }

    Status set_from_file(const std::string& key, const toml::node& node, const std::string& path) {
        auto found = std::find_if(settings.begin(), settings.end(),
                                  [&](const Setting& s) { return s.name == key; });
        if (found == settings.end()) return unknown(key, " in " + path, false);
        std::string where = fmt::format("{} in {}", key, path);
        std::vector<std::string> values;
        const toml::array* list = node.as_array();
        if (list != nullptr && !found->is_list)
            return invalid(where + " is a list", "give one value");
        if (list == nullptr) {
            ASSIGN_OR_RETURN(values.emplace_back(), text_of(node, where));
        } else {
            for (const toml::node& item : *list) {
                ASSIGN_OR_RETURN(values.emplace_back(), text_of(item, where));
            }
        }
        if (!found->given.empty()) return Status::ok();
        return take(*found, values, where);
    }

    /// Sets a setting from one place; a list replaces its default.
    static Status take(Setting& setting, const std::vector<std::string>& values,
                       const std::string& where) {
        if (setting.clear && !values.empty()) setting.clear();
        for (const std::string& value : values) RETURN_IF_ERROR(setting.set(value, where));
        setting.seen = !values.empty();
        return Status::ok();
    }

    bool is_flag_name(const std::string& word) const {
        return std::any_of(settings.begin(), settings.end(),
                           [&](const Setting& s) { return flag_of(s.name) == word; });
    }

    /// `--listen --name x` is a forgotten value, not a service that listens on "--name".
    Status check_flags() const {
        for (const Setting& setting : settings)
            for (const std::string& value : setting.given)
                if (!setting.is_flag && is_flag_name(value))
                    return invalid(fmt::format("{} needs a value, but {} follows",
                                               flag_of(setting.name), value),
                                   fmt::format("see {} --help", program));
        return Status::ok();
    }

    Status take_flags() {
        for (Setting& setting : settings)
            RETURN_IF_ERROR(take(setting, setting.given, flag_of(setting.name)));
        return Status::ok();
    }
};

Settings::Settings(std::string program, std::string summary) : impl_(std::make_unique<Impl>()) {
    impl_->program = std::move(program);
    impl_->summary = std::move(summary);
}
Settings::~Settings() = default;

void Settings::add_text(std::string name, std::string* value, std::string help, bool required) {
    if (!value->empty()) help += fmt::format(" [{}]", *value);
    Setting& setting = impl_->add(std::move(name), "TEXT", std::move(help));
    setting.required = required;
    setting.set = [value](const std::string& text, const std::string&) {
        *value = text;
        return Status::ok();
    };
}

void Settings::add_choice(std::string name, std::string* value, std::vector<std::string> choices,
                          std::string help) {
    help += fmt::format(" [{}]", *value);
    std::string joined = fmt::format("{}", fmt::join(choices, "|"));
    Setting& setting = impl_->add(std::move(name), joined, std::move(help));
    setting.set = [value, choices, joined](const std::string& text,
                                           const std::string& where) -> Status {
        if (std::find(choices.begin(), choices.end(), text) == choices.end())
            return invalid(fmt::format("{}: '{}' is not one of {}", where, text, joined),
                           "choose one of them");
        *value = text;
        return Status::ok();
    };
}

void Settings::add_integer(std::string name, std::int64_t* value, std::int64_t min,
                           std::int64_t max, std::string help) {
    help += fmt::format(" [{}]", *value);
    Setting& setting = impl_->add(std::move(name), "INTEGER", std::move(help));
    setting.set = [value, min, max](const std::string& text, const std::string& where) -> Status {
        std::int64_t parsed = 0;
        auto [end, code] = std::from_chars(text.data(), text.data() + text.size(), parsed);
        if (code != std::errc{} || end != text.data() + text.size() || parsed < min || parsed > max)
            return invalid(
                fmt::format("{}: '{}' is not a whole number from {} to {}", where, text, min, max),
                "give a number in that range");
        *value = parsed;
        return Status::ok();
    };
}

void Settings::add_bytes(std::string name, std::uint64_t* value, std::string help) {
    help += fmt::format(" [{}]", format_bytes(*value));
    Setting& setting = impl_->add(std::move(name), "BYTES", std::move(help));
    setting.set = [value](const std::string& text, const std::string& where) -> Status {
        Result<std::uint64_t> parsed = parse_bytes(text);
        if (!parsed) return std::move(parsed).error().with_context(where);
        *value = *parsed;
        return Status::ok();
    };
}

void Settings::add_number(std::string name, double* value, double min, double max,
                          std::string help) {
    help += fmt::format(" [{}]", *value);
    Setting& setting = impl_->add(std::move(name), "NUMBER", std::move(help));
    setting.set = [value, min, max](const std::string& text, const std::string& where) -> Status {
        double parsed = 0;
        auto [end, code] = std::from_chars(text.data(), text.data() + text.size(), parsed);
        if (code != std::errc{} || end != text.data() + text.size() || !(parsed >= min) ||
            !(parsed <= max))
            return invalid(
                fmt::format("{}: '{}' is not a number from {} to {}", where, text, min, max),
                "give a number in that range");
        *value = parsed;
        return Status::ok();
    };
}

void Settings::add_flag(std::string name, bool* value, std::string help) {
    Setting& setting = impl_->add(std::move(name), "", std::move(help));
    setting.is_flag = true;
    setting.set = [value](const std::string& text, const std::string& where) -> Status {
        if (text != "true" && text != "false")
            return invalid(fmt::format("{}: '{}' is neither true nor false", where, text),
                           "give true or false");
        *value = text == "true";
        return Status::ok();
    };
}

void Settings::add_list(std::string name, std::vector<std::string>* value, std::string help,
                        bool required) {
    Setting& setting = impl_->add(std::move(name), "TEXT ...", std::move(help));
    setting.is_list = true;
    setting.required = required;
    setting.clear = [value] { value->clear(); };
    setting.set = [value](const std::string& text, const std::string&) {
        value->push_back(text);
        return Status::ok();
    };
}

Result<Settings::Action> Settings::parse(int argc, const char* const* argv) {
    auto action = take_words(argc, argv);
    if (action.has_value()) return action;
    return std::move(action).error().with_context(impl_->program);
}

Result<Settings::Action> Settings::take_words(int argc, const char* const* argv) {
    Impl& impl = *impl_;
    CLI::App app(impl.summary, impl.program);
    app.set_version_flag("--version", std::string(version()));
    app.allow_extras();
    std::string config;
    app.add_option("--config", config, "settings file (TOML); - reads standard input")
        ->option_text("FILE");
    std::deque<bool> flags(impl.settings.size(), false);
    for (std::size_t i = 0; i < impl.settings.size(); ++i) {
        Setting& setting = impl.settings[i];
        CLI::Option* option =
            setting.is_flag
                ? app.add_flag(flag_of(setting.name), flags[i], setting.help)
                : app.add_option(flag_of(setting.name), setting.given, setting.help)
                      ->option_text(setting.kind + (setting.required ? " (required)" : ""));
        if (!setting.is_flag) option->expected(1)->allow_extra_args(false);
        if (setting.is_list)
            option->expected(1)->multi_option_policy(CLI::MultiOptionPolicy::TakeAll);
    }
    try {
        app.parse(argc, argv);
    } catch (const CLI::Success& e) {
        app.exit(e, std::cout, std::cerr);
        return Action::exit;
    } catch (const CLI::ArgumentMismatch& e) {
        const std::string_view what = e.what();  // "--threads: 1 required INTEGER missing"
        return invalid(fmt::format("{} {}", what.substr(0, what.find(':')),
                                   what.ends_with("missing") ? "needs a value" : "takes one value"),
                       fmt::format("see {} --help", impl.program));
    } catch (const CLI::ParseError& e) {
        return invalid(e.what(), fmt::format("see {} --help", impl.program));
    }
    RETURN_IF_ERROR(impl.check_flags());
    if (std::vector<std::string> extras = app.remaining(); !extras.empty()) {
        std::string word = extras.front().substr(0, extras.front().find('='));
        if (word.starts_with("-")) RETURN_IF_ERROR(impl.unknown(word, "", true));
        return invalid(fmt::format("unexpected argument '{}'", word),
                       fmt::format("see {} --help", impl.program));
    }
    for (std::size_t i = 0; i < impl.settings.size(); ++i) {
        Setting& setting = impl.settings[i];
        if (setting.is_flag && app.count(flag_of(setting.name)) > 0)
            setting.given = {flags[i] ? "true" : "false"};
    }
    RETURN_IF_ERROR(impl.take_flags());
    if (!config.empty()) RETURN_IF_ERROR(impl.read_file(config));
    for (const Setting& setting : impl.settings)
        if (setting.required && !setting.seen)
            return invalid(fmt::format("{} is required: {}", flag_of(setting.name), setting.help),
                           fmt::format("see {} --help", impl.program));
    return Action::run;
}

std::string_view version() noexcept { return K3_VERSION; }

}  // namespace k3
