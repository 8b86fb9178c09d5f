#include "launcher/cli.h"

#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <charconv>
#include <iostream>
#include <memory>

#include "common/base/settings.h"
#include "launcher/cli_flags.h"

namespace k3::launcher {

namespace {

constexpr std::string_view kNotConverted = "Could not convert: ";  // and "--chat = maybe"

Error usage(std::string message, std::string_view verb) {
    return Error{ErrorCode::invalid_argument, std::move(message),
                 fmt::format("see k3pipe {}{}--help", verb, verb.empty() ? "" : " ")};
}

std::vector<std::string> flags_of(const CLI::App& app) {
    std::vector<std::string> flags;
    for (const CLI::Option* option : app.get_options())
        for (const std::string& name : option->get_lnames())
            flags.push_back(fmt::format("--{}", name));
    return flags;
}

/// What was probably meant by a word that nobody understood; empty if nothing comes to mind.
std::string guess(const std::string& word, const CLI::App& app, const CLI::App* verb) {
    if (word.starts_with("-")) {
        std::string nearest = nearest_name(word, flags_of(verb == nullptr ? app : *verb));
        return nearest.empty() ? "" : fmt::format("did you mean {}?", nearest);
    }
    if (verb == nullptr) {
        std::vector<std::string> verbs;
        for (const CLI::App* known : app.get_subcommands({})) verbs.push_back(known->get_name());
        std::string nearest = nearest_name(word, verbs);
        return nearest.empty() ? "" : fmt::format("did you mean {}?", nearest);
    }
    std::vector<std::string> flags = flags_of(*verb);
    auto takes = [&flags](const char* flag) {
        return std::find(flags.begin(), flags.end(), flag) != flags.end();
    };
    if (word.ends_with(".toml") && takes("--config"))
        return fmt::format("a pipeline file is given with -c {}", word);
    if (takes("--prompt")) return "the prompt is given with -p, in quotes";
    return "";
}

/// The error for the first word that nobody understood, or nothing.
std::optional<Error> unknown_word(const CLI::App& app, const CLI::App* verb) {
    std::vector<std::string> before = app.remaining();
    if (verb != nullptr && !before.empty() && before.front().starts_with("-"))
        return Error{
            ErrorCode::invalid_argument,
            fmt::format("flag '{}' stands before the verb {}", before.front(), verb->get_name()),
            fmt::format("write k3pipe {} {} ...", verb->get_name(), before.front())};
    std::vector<std::string> extras = app.remaining(true);
    if (extras.empty()) return std::nullopt;
    std::string word = extras.front().substr(0, extras.front().find('='));
    std::string name = verb == nullptr ? "" : verb->get_name();
    std::string kind = word.starts_with("-") ? "flag" : verb == nullptr ? "verb" : "argument";
    Error error =
        usage(fmt::format("{}{}unknown {} '{}'", name, name.empty() ? "" : ": ", kind, word), name);
    if (std::string meant = guess(word, app, verb); !meant.empty()) error.remedy = meant;
    return error;
}

/// An empty word is hardly meant: mostly a variable of a script that is not set.
std::optional<Error> empty_value(const CLI::App& verb) {
    for (const CLI::Option* option : verb.get_options()) {
        bool may_be_empty = option->check_name("--prompt") || option->check_name("--attach");
        for (const std::string& value : option->results())
            if (value.empty() && !may_be_empty && option->get_items_expected_max() > 0)
                return usage(fmt::format("{}: {} is empty", verb.get_name(), option->get_name()),
                             verb.get_name());
    }
    return std::nullopt;
}

/// What CLI11 says about values, in our words.
std::string problem_of(const CLI::ParseError& error) {
    std::string_view what = error.what();
    if (what.starts_with(kNotConverted))
        return fmt::format("{} cannot be meant", what.substr(kNotConverted.size()));
    if (dynamic_cast<const CLI::ArgumentMismatch*>(&error) == nullptr) return std::string(what);
    // "--prompt: 1 required TEXT missing", "--seed: At Most 1 required but received 2"
    return fmt::format("{} {}", what.substr(0, what.find(':')),
                       what.ends_with("missing") ? "needs a value" : "takes one value");
}

Result<CommandLine> complete_run(const CLI::App* verb, RawCommands& raw) {
    RunCommand& run = raw.run;
    auto given = [verb](const char* flag) { return verb->count(flag) > 0; };
    if (given("--prompt") + given("--file") + given("--ids") + given("--messages") != 1)
        return usage("run: give the prompt by exactly one of -p, -f, --ids and --messages", "run");
    bool filters = given("--top-k") || given("--top-p") || given("--min-p");
    if (!given("--temperature")) run.params.temperature = filters ? 1.0F : 0.0F;
    run.greedy = run.params.temperature == 0.0F;
    run.seed_given = given("--seed");
    run.attach = given("--attach");
    run.attach_name = raw.attach;
    run.effort = raw.effort == "low"    ? Effort::low
                 : raw.effort == "high" ? Effort::high
                 : raw.effort == "max"  ? Effort::max
                                        : Effort::off;
    auto needs = [](const char* flag, const char* other) {
        return usage(fmt::format("run: {} has no effect without {}", flag, other), "run");
    };
    if (given("--effort") && !run.chat && !run.messages) return needs("--effort", "--chat");
    if (run.raw && !run.chat && !run.messages) return needs("--raw", "--chat");
    if (run.n_logprobs > 0 && !run.json) return needs("--logprobs", "--json");
    if (run.prompt_logits && run.logits_out.empty())
        return needs("--prompt-logits", "--logits-out");
    auto excludes = [](const char* flag, const char* other) {
        return usage(fmt::format("run: {} and {} exclude each other", flag, other), "run");
    };
    if (run.chat && run.ids) return excludes("--chat", "--ids");
    if (run.special && (run.chat || run.messages || run.ids))
        return usage(
            "run: --special is for plain text: messages are never parsed for "
            "special tokens",
            "run");
    if (run.attach && !run.gateway.empty()) return excludes("--attach", "--gateway");
    if (!run.keys.empty() && !run.attach && run.gateway.empty())
        return usage("run: --keys has no effect without --attach or --gateway", "run");
    if ((run.attach || !run.gateway.empty()) && !run.config.empty())
        return excludes("-c", run.attach ? "--attach" : "--gateway");
    if ((run.attach || !run.gateway.empty()) && run.slurm)
        return excludes("--slurm", run.attach ? "--attach" : "--gateway");
    return CommandLine(std::move(run));
}

Result<CommandLine> complete_plan(const CLI::App* verb, PlanCommand plan) {
    if (plan.simulate.empty())
        for (const char* flag : {"--rows", "--boxes", "--link-rate", "--round-trip-us"})
            if (verb->count(flag) > 0)
                return usage(fmt::format("plan: {} has no effect without --simulate", flag),
                             "plan");
    return CommandLine(std::move(plan));
}

/// "0/2".
bool parse_part(const std::string& text, pack::Part* part) {
    const char* end = text.data() + text.size();
    const auto [slash, no_index] = std::from_chars(text.data(), end, part->index);
    if (no_index != std::errc() || slash == end || *slash != '/') return false;
    const auto [stop, no_count] = std::from_chars(slash + 1, end, part->count);
    return no_count == std::errc() && stop == end && part->index < part->count &&
           part->count <= pack::format::kMaxParts;
}

Result<CommandLine> complete_pack(const CLI::App* verb, RawCommands& raw) {
    PackCommand& pack = raw.pack;
    auto given = [verb](const char* flag) { return verb->count(flag) > 0; };
    auto meaningless = [&raw](const char* flag, const char* kind) {
        return usage(fmt::format("pack {}: {} is for pack {}", raw.pack_kind, flag, kind), "pack");
    };
    if (raw.pack_kind == "trunk") {
        if (given("--share")) return meaningless("--share", "experts");
        if (given("--list")) return meaningless("--list", "experts");
        if (given("--part") && !parse_part(raw.pack_part, &pack.part))
            return usage(
                fmt::format("pack trunk: --part '{}' is not I/N with I from 0 to N-1 and N "
                            "at most {}",
                            raw.pack_part, pack::format::kMaxParts),
                "pack");
        pack.kind = pack::Kind::trunk;
    } else {
        if (given("--layers")) return meaningless("--layers", "trunk");
        if (given("--part")) return meaningless("--part", "trunk");
        if (given("--share") + given("--list") != 1)
            return usage("pack experts: say which by exactly one of --share and --list", "pack");
        if (given("--list")) pack.share = raw.pack_list;
        pack.kind = pack::Kind::experts;
    }
    return CommandLine(std::move(pack));
}

Result<CommandLine> complete_render(const CLI::App* verb, RawCommands& raw) {
    RenderCommand& render = raw.render;
    const bool is_systemd = raw.render_kind == "systemd";
    render.manager = is_systemd ? RenderCommand::For::systemd : RenderCommand::For::kubernetes;
    auto meaningless = [&](const char* flag, const char* kind) {
        return usage(fmt::format("render {}: {} is for render {}", raw.render_kind, flag, kind),
                     "render");
    };
    if (is_systemd) {
        for (const char* flag : {"--image", "--keys-secret", "--model-claim"})
            if (verb->count(flag) > 0) return meaningless(flag, "kubernetes");
        if (render.user_units && !render.account.empty())
            return usage("render systemd: --user and --account exclude each other", "render");
    } else {
        for (const char* flag : {"--user", "--account"})
            if (verb->count(flag) > 0) return meaningless(flag, "systemd");
        if (render.image.empty())
            return usage(
                "render kubernetes: --image says which container image has k3pipe, and "
                "is not given",
                "render");
    }
    if (!render.programs.empty() && !render.programs.is_absolute())
        return usage(fmt::format("render: --programs '{}' is not an absolute path",
                                 render.programs.string()),
                     "render");
    return CommandLine(std::move(render));
}

Result<CommandLine> complete_synth(const CLI::App* verb, SynthCommand synth) {
    if (!synth.options.sparse) return CommandLine(std::move(synth));
    for (const char* flag : {"--layers", "--experts", "--vocab", "--seed"})
        if (verb->count(flag) > 0)
            return usage(fmt::format("synth: --sparse and {} exclude each other", flag), "synth");
    synth.options = model::kReleasedSize;
    return CommandLine(std::move(synth));
}

}  // namespace

Result<CommandLine> parse_command_line(int argc, const char* const* argv) {
    if (argc == 2 && std::string_view(argv[1]) == "host-stage")
        return CommandLine(HostStageCommand{});
    RawCommands raw;
    Verbs verbs = {};
    std::unique_ptr<CLI::App> app = declare_command_line(raw, &verbs);
    // `k3pipe help run` is `k3pipe run --help`.
    std::vector<const char*> words(argv, argv + argc);
    if (argc > 1 && std::string_view(argv[1]) == "help") {
        words.erase(words.begin() + 1);
        words.push_back("--help");
    }
    std::optional<std::string> problem;
    try {
        app->parse(static_cast<int>(words.size()), words.data());
    } catch (const CLI::Success& e) {
        app->exit(e, std::cout, std::cerr);
        return CommandLine(NothingCommand{});
    } catch (const CLI::ParseError& e) {
        problem = problem_of(e);
    }
    const CLI::App* verb =
        app->get_subcommands().empty() ? nullptr : app->get_subcommands().front();
    // An unknown word explains more than what is missing because of it.
    if (auto error = unknown_word(*app, verb)) return *std::move(error);
    std::string name = verb == nullptr ? "" : verb->get_name();
    if (problem.has_value())
        return usage(fmt::format("{}{}{}", name, name.empty() ? "" : ": ", *problem), name);
    if (verb == nullptr) {
        std::cout << app->help();
        return CommandLine(NothingCommand{});
    }
    if (auto error = empty_value(*verb)) return *std::move(error);
    if (verb == verbs.up) return CommandLine(std::move(raw.up));
    if (verb == verbs.run) return complete_run(verb, raw);
    if (verb == verbs.status) return CommandLine(std::move(raw.status));
    if (verb == verbs.down) return CommandLine(std::move(raw.down));
    if (verb == verbs.plan) return complete_plan(verb, std::move(raw.plan));
    if (verb == verbs.placement) {
        raw.placement.shape_given = verb->count("--replicas") + verb->count("--replicated") > 0;
        return CommandLine(std::move(raw.placement));
    }
    if (verb == verbs.pack) return complete_pack(verb, raw);
    if (verb == verbs.keys) return CommandLine(std::move(raw.keys));
    if (verb == verbs.render) return complete_render(verb, raw);
    if (verb == verbs.probe) return CommandLine(std::move(raw.probe));
    if (verb == verbs.verify) return CommandLine(std::move(raw.verify));
    if (verb == verbs.init) return CommandLine(std::move(raw.init));
    if (verb == verbs.doctor) {
        const ModelFiles& files = raw.doctor.files;
        const bool has_packs = !files.trunk_pack.empty() || !files.experts_pack.empty();
        if (!raw.doctor.config.empty() && (!files.directory.empty() || has_packs))
            return usage("doctor: give a model or -c, not both", "doctor");
        if (has_packs && files.directory.empty())
            return usage("doctor: packs need a directory with their config.json", "doctor");
        return CommandLine(std::move(raw.doctor));
    }
    return complete_synth(verbs.synth, std::move(raw.synth));
}

}  // namespace k3::launcher
