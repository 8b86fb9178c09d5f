#include "common/base/settings.h"

#include <fmt/format.h>

#include <toml++/toml.h>
#include <CLI/CLI.hpp>
#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstdio>
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

std::size_t edit_distance(std::string_view a, std::string_view b) {
    std::vector<std::size_t> row(b.size() + 1);
    for (std::size_t j = 0; j <= b.size(); ++j) row[j] = j;
    for (std::size_t i = 1; i <= a.size(); ++i) {
        std::size_t diagonal = row[0];
        row[0] = i;
        for (std::size_t j = 1; j <= b.size(); ++j) {
            std::size_t replaced = diagonal + (a[i - 1] == b[j - 1] ? 0 : 1);
            diagonal = row[j];
            row[j] = std::min({row[j] + 1, row[j - 1] + 1, replaced});
        }
    }
    return row[b.size()];
}

Error invalid(std::string message, std::string remedy) {
    return Error{ErrorCode::invalid_argument, std::move(message), std::move(remedy)};
}

/// A TOML scalar as the text a flag would carry.
std::string text_of(const toml::node& node) {
    if (const auto* text = node.as_string()) return text->get();
    if (const auto* flag = node.as_boolean()) return flag->get() ? "true" : "false";
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
    std::vector<std::string> given;  // on the command line
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
        return invalid(fmt::format("{}: unknown setting {}{}", program, word, where),
                       nearest.empty() ? fmt::format("see {} --help", program)
                                       : fmt::format("did you mean {}?", nearest));
    }

    Status read_file(const std::string& path) {
        std::string text;
        if (path == "-") {
            text.assign(std::istreambuf_iterator<char>(std::cin), {});
        } else {
            std::ifstream file(path);
            if (!file)
                return Error{ErrorCode::not_found,
                             fmt::format("{}: cannot read settings file {}", program, path),
                             "check the path given to --config"};
            text.assign(std::istreambuf_iterator<char>(file), {});
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
        if (const auto* list = node.as_array()) {
            if (!found->is_list) return invalid(where + " is a list", "give one value");
            if (found->given.empty())
                for (const auto& item : *list) RETURN_IF_ERROR(found->set(text_of(item), where));
        } else if (found->given.empty()) {  // a flag beats the file
            RETURN_IF_ERROR(found->set(text_of(node), where));
        }
        found->seen = true;
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
    setting.set = [value](const std::string& text, const std::string&) {
        value->push_back(text);
        return Status::ok();
    };
}

Result<Settings::Action> Settings::parse(int argc, const char* const* argv) {
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
    } catch (const CLI::ParseError& e) {
        return invalid(fmt::format("{}: {}", impl.program, e.what()),
                       fmt::format("see {} --help", impl.program));
    }
    if (std::vector<std::string> extras = app.remaining(); !extras.empty()) {
        std::string word = extras.front().substr(0, extras.front().find('='));
        if (word.starts_with("-")) RETURN_IF_ERROR(impl.unknown(word, "", true));
        return invalid(fmt::format("{}: unexpected argument '{}'", impl.program, word),
                       fmt::format("see {} --help", impl.program));
    }
    for (std::size_t i = 0; i < impl.settings.size(); ++i) {
        Setting& setting = impl.settings[i];
        if (setting.is_flag && flags[i]) setting.given = {"true"};
        for (const std::string& value : setting.given)
            RETURN_IF_ERROR(setting.set(value, flag_of(setting.name)));
        setting.seen = !setting.given.empty();
    }
    if (!config.empty()) RETURN_IF_ERROR(impl.read_file(config));
    for (const Setting& setting : impl.settings)
        if (setting.required && !setting.seen)
            return invalid(fmt::format("{}: {} is required: {}", impl.program,
                                       flag_of(setting.name), setting.help),
                           fmt::format("see {} --help", impl.program));
    return Action::run;
}

Result<std::uint64_t> parse_bytes(std::string_view text) {
    struct Unit {
        std::string_view suffix;
        double factor;
    };
    static constexpr Unit kUnits[] = {{"KiB", 1024.0},
                                      {"MiB", 1048576.0},
                                      {"GiB", 1073741824.0},
                                      {"TiB", 1099511627776.0},
                                      {"kB", 1e3},
                                      {"KB", 1e3},
                                      {"MB", 1e6},
                                      {"GB", 1e9},
                                      {"TB", 1e12},
                                      {"B", 1.0},
                                      {"", 1.0}};
    double number = 0;
    auto [end, code] = std::from_chars(text.data(), text.data() + text.size(), number);
    std::string_view suffix(end, static_cast<std::size_t>(text.data() + text.size() - end));
    while (!suffix.empty() && suffix.front() == ' ') suffix.remove_prefix(1);
    for (const Unit& unit : kUnits) {
        if (code != std::errc{} || suffix != unit.suffix) continue;
        double bytes = number * unit.factor;
        if (bytes >= 0 && bytes < 9e18) return static_cast<std::uint64_t>(std::llround(bytes));
    }
    return invalid(fmt::format("'{}' is not a size", text),
                   "write a number of bytes, or one with KiB, MiB, GiB, TiB, kB, MB, GB or TB");
}

std::string format_bytes(std::uint64_t bytes) {
    static constexpr std::string_view kUnits[] = {"B", "KiB", "MiB", "GiB", "TiB"};
    double value = static_cast<double>(bytes);
    std::size_t unit = 0;
    while (value >= 1024 && unit + 1 < std::size(kUnits)) {
        value /= 1024;
        ++unit;
    }
    if (unit == 0 || value == std::floor(value))
        return fmt::format("{:.0f} {}", value, kUnits[unit]);
    return fmt::format("{:.2f} {}", value, kUnits[unit]);
}

std::string nearest_name(std::string_view word, std::span<const std::string> candidates) {
    std::string best;
    std::size_t best_distance = std::min<std::size_t>(4, word.size() / 2 + 1);
    for (const std::string& candidate : candidates) {
        std::size_t distance = edit_distance(word, candidate);
        if (distance < best_distance) {
            best_distance = distance;
            best = candidate;
        }
    }
    return best;
}

std::string_view version() noexcept { return K3_VERSION; }

}  // namespace k3
