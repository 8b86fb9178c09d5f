#include "launcher/cli.h"

#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <iostream>

#include "common/base/settings.h"

namespace k3::launcher {

namespace {

constexpr const char* kAbout =
    "Runs Kimi K3 on CPUs as a pipeline of cooperating processes.\n\n"
    "Examples:\n"
    "  k3pipe run -p \"The capital of France is\"      start the demo, answer, stop\n"
    "  k3pipe up -c pipeline.toml                     start and watch until Ctrl-C\n"
    "  k3pipe run --attach -p \"Hello\"                 ask the pipeline that runs\n"
    "  k3pipe status                                  what runs, stage by stage\n"
    "  k3pipe plan -c pipeline.toml                   what would start, and its memory\n";

constexpr const char* kRunAbout =
    "Generate a continuation or an answer; the text goes to stdout as it comes, the rest to "
    "stderr.\n"
    "Starts a pipeline of its own and stops it afterwards, unless told to use a running one.\n\n"
    "Examples:\n"
    "  k3pipe run -p \"The capital of France is\"\n"
    "  k3pipe run --chat -p \"What is 8 + 9?\" --effort low\n"
    "  k3pipe run -f prompt.txt --temperature 0.7 --seed 1 --max-tokens 200\n"
    "  k3pipe run --attach -p \"Hello\" --json\n";

/// What CLI11 fills and needs_more turns into a command.
struct Raw {
    UpCommand up;
    RunCommand run;
    StatusCommand status;
    DownCommand down;
    PlanCommand plan;
    SynthCommand synth;
    std::string effort = "off";
    std::string attach;
};

struct Verbs {
    CLI::App* up;
    CLI::App* run;
    CLI::App* status;
    CLI::App* down;
    CLI::App* plan;
    CLI::App* synth;
};

void add_config(CLI::App* verb, std::filesystem::path* config, std::filesystem::path* run_dir) {
    verb->add_option("-c,--config", *config, "pipeline file [the shipped demo.toml]")
        ->option_text("FILE");
    verb->add_option("--run-dir", *run_dir,
                     "folder of run directories [${XDG_RUNTIME_DIR:-/tmp}/k3pipe-<uid>]")
        ->option_text("DIR");
}

void add_run_dir(CLI::App* verb, std::filesystem::path* run_dir) {
    verb->add_option("--run-dir", *run_dir, "folder of run directories, as given to up")
        ->option_text("DIR");
}

void add_input(CLI::App* verb, Raw& raw) {
    RunCommand& run = raw.run;
    CLI::Option_group* input = verb->add_option_group("Prompt", "one of these is needed");
    input->add_option("-p,--prompt", run.prompt, "the text to continue")->option_text("TEXT");
    input->add_option("-f,--file", run.prompt_file, "read it from a file; - is standard input")
        ->option_text("FILE");
    input->add_option("--ids", run.ids, "token ids instead of text: 1,2,3")->option_text("IDS");
    input
        ->add_option("--messages", run.messages,
                     "a conversation: a JSON list of messages, or an object with messages, tools, "
                     "thinking_effort, response_format")
        ->option_text("FILE.json");
    input->require_option(1);
    verb->add_flag("--chat", run.chat, "the text is a user's message in a conversation");
    verb->add_option("--effort", raw.effort, "thinking before the answer in a chat [off]")
        ->check(CLI::IsMember({"off", "low", "high", "max"}))
        ->option_text("off|low|high|max");
    verb->add_flag("--special", run.special,
                   "text that spells a special token becomes that token [it stays text]");
}

void add_sampling(CLI::App* verb, RunCommand& run) {
    msg::SamplingParams& params = run.params;
    verb->add_option("--max-tokens", run.max_tokens,
                     "stop after so many tokens; 0: at a stop or the end of the context [256]")
        ->option_text("N");
    verb->add_option("--temperature", params.temperature,
                     "0 is greedy: always the likeliest token [0, or 1 with any filter below]")
        ->option_text("T");
    verb->add_option("--top-k", params.top_k, "only the K likeliest [off]")->option_text("K");
    verb->add_option("--top-p", params.top_p, "only the likeliest that sum to P [off]")
        ->option_text("P");
    verb->add_option("--min-p", params.min_p, "only those with P times the largest [off]")
        ->option_text("P");
    verb->add_option("--repetition-penalty", params.repetition_penalty, "of seen tokens [1: off]")
        ->option_text("X");
    verb->add_option("--presence-penalty", params.presence_penalty, "of generated tokens [0: off]")
        ->option_text("X");
    verb->add_option("--frequency-penalty", params.frequency_penalty,
                     "for each time a token was generated [0: off]")
        ->option_text("X");
    verb->add_option("--seed", params.seed, "of the random choices [a new one, which is printed]")
        ->option_text("N");
    verb->add_option("--stop", run.stops, "end before this text; may be given several times")
        ->expected(1)
        ->multi_option_policy(CLI::MultiOptionPolicy::TakeAll)
        ->option_text("TEXT");
    verb->add_flag("--ignore-eos", run.ignore_eos, "go on after the model's own stop tokens");
}

void add_output(CLI::App* verb, Raw& raw) {
    RunCommand& run = raw.run;
    verb->add_flag("--json", run.json,
                   "JSON lines on stdout: accepted, tokens..., and last finished with everything");
    verb->add_option("--logprobs", run.n_logprobs, "with --json: so many alternatives per token")
        ->option_text("N");
    verb->add_flag("--raw", run.raw, "in a chat, print the markers of the chat format too");
    verb->add_option("--logits-out", run.logits_out,
                     "write the logits of every generated token: .npy, [n, vocab_size] float32")
        ->option_text("FILE");
    verb->add_flag("--prompt-logits", run.prompt_logits,
                   "with --logits-out: those of every prompt position first");
    verb->add_option("--attach", raw.attach, "use a running pipeline [the only one]")
        ->expected(0, 1)
        ->option_text("[NAME]");
    verb->add_option("--gateway", run.gateway, "use the gateway at this endpoint")
        ->option_text("ENDPOINT");
    verb->add_flag("-v,--verbose", run.verbose, "also print what the services log");
}

Verbs declare(CLI::App& app, Raw& raw) {
    Verbs verbs = {};
    verbs.up = app.add_subcommand(
        "up",
        "Start a pipeline and watch it until Ctrl-C or `k3pipe down`.\n\nExample: k3pipe up -c "
        "configs/tiny-three-experts.toml");
    add_config(verbs.up, &raw.up.config, &raw.up.run_dir);
    verbs.up->add_option("--name", raw.up.name, "call it so [name in the file]")
        ->option_text("NAME");
    verbs.up->add_flag("-v,--verbose", raw.up.verbose, "also print what the services log");

    verbs.run = app.add_subcommand("run", kRunAbout);
    add_input(verbs.run, raw);
    add_sampling(verbs.run, raw.run);
    add_output(verbs.run, raw);
    add_config(verbs.run, &raw.run.config, &raw.run.run_dir);

    verbs.status = app.add_subcommand(
        "status", "Show what runs, stage by stage.\n\nExample: k3pipe status demo");
    verbs.status->add_option("name", raw.status.name, "only this pipeline [all]");
    verbs.status->add_flag("--json", raw.status.json, "as JSON");
    add_run_dir(verbs.status, &raw.status.run_dir);

    verbs.down = app.add_subcommand(
        "down", "Stop a running pipeline and wait until it is gone.\n\nExample: k3pipe down demo");
    verbs.down->add_option("name", raw.down.name, "which one [the only one]");
    add_run_dir(verbs.down, &raw.down.run_dir);

    verbs.plan = app.add_subcommand(
        "plan",
        "Show what would be started: command lines to copy, memory, bytes read per token.\n\n"
        "Example: k3pipe plan -c configs/demo.toml");
    add_config(verbs.plan, &raw.plan.config, &raw.plan.run_dir);
    verbs.plan->add_option("--name", raw.plan.name, "call it so [name in the file]")
        ->option_text("NAME");

    verbs.synth = app.add_subcommand(
        "synth",
        "Write a checkpoint of random weights in the released layout, for benchmarks.\n\n"
        "Example: k3pipe synth /var/tmp/k3-synthetic      11.5 GB");
    verbs.synth->add_option("directory", raw.synth.directory, "where; it must not exist yet")
        ->required()
        ->option_text("DIR");
    model::SyntheticOptions& options = raw.synth.options;
    verbs.synth->add_option("--layers", options.n_layers, "4 to 93 [5]")->option_text("N");
    verbs.synth->add_option("--experts", options.n_experts, "of a layer: 16 to 896 [64]")
        ->option_text("N");
    verbs.synth->add_option("--vocab", options.vocab_size, "vocabulary rows: 512 to 163840 [4096]")
        ->option_text("N");
    verbs.synth->add_option("--seed", options.seed, "of the random weights [1]")->option_text("N");

    for (CLI::App* verb : {verbs.up, verbs.run, verbs.status, verbs.down, verbs.plan, verbs.synth})
        verb->allow_extras();
    return verbs;
}

Error usage(std::string message, std::string_view verb) {
    return Error{ErrorCode::invalid_argument, std::move(message),
                 fmt::format("see k3pipe {}{}--help", verb, verb.empty() ? "" : " ")};
}

/// The error for the first word that nobody understood.
Error unknown_word(const std::string& word, const CLI::App* verb) {
    std::string name = verb == nullptr ? "" : verb->get_name();
    std::vector<std::string> known;
    if (verb == nullptr) known = {"up", "run", "status", "down", "plan", "synth"};
    std::string kind = verb == nullptr ? "verb" : "argument";
    std::string bare = word.substr(0, word.find('='));
    if (word.starts_with("-")) {
        kind = "flag";
        known = {"--help", "--version"};
        if (verb != nullptr)
            for (const CLI::Option* option : verb->get_options())
                for (const std::string& flag : option->get_lnames()) known.push_back("--" + flag);
        if (verb != nullptr)  // those of the option group
            for (const CLI::App* group :
                 verb->get_subcommands([](const CLI::App*) { return true; }))
                for (const CLI::Option* option : group->get_options())
                    for (const std::string& flag : option->get_lnames())
                        known.push_back("--" + flag);
    }
    std::string where = name.empty() ? "" : name + ": ";
    Error error = usage(fmt::format("{}unknown {} '{}'", where, kind, bare), name);
    if (std::string nearest = nearest_name(bare, known); !nearest.empty())
        error.remedy = fmt::format("did you mean {}?", nearest);
    return error;
}

Result<CommandLine> complete_run(const CLI::App* verb, Raw& raw) {
    RunCommand& run = raw.run;
    auto given = [verb](const char* flag) { return verb->count(flag) > 0; };
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
    if ((run.attach || !run.gateway.empty()) && !run.config.empty())
        return excludes("-c", run.attach ? "--attach" : "--gateway");
    return CommandLine(std::move(run));
}

}  // namespace

Result<CommandLine> parse_command_line(int argc, const char* const* argv) {
    CLI::App app(kAbout, "k3pipe");
    app.set_version_flag("--version", "k3pipe " + std::string(version()));
    app.allow_extras();
    Raw raw;
    Verbs verbs = declare(app, raw);
    const CLI::App* verb = nullptr;
    std::optional<std::string> problem;
    try {
        app.parse(argc, argv);
    } catch (const CLI::Success& e) {
        app.exit(e, std::cout, std::cerr);
        return CommandLine(NothingCommand{});
    } catch (const CLI::ParseError& e) {
        problem = e.what();
    }
    if (!app.get_subcommands().empty()) verb = app.get_subcommands().front();
    // An unknown word explains more than what is missing because of it.
    if (auto extras = app.remaining(true); !extras.empty())
        return unknown_word(extras.front(), verb);
    std::string name = verb == nullptr ? "" : verb->get_name();
    if (problem.has_value()) {
        if (verb == verbs.run && problem->starts_with("Exactly 1 option from [-p"))
            return usage(
                "run: give the prompt by exactly one of -p, -f, --ids and "
                "--messages",
                "run");
        return usage(fmt::format("{}{}{}", name, name.empty() ? "" : ": ", *problem), name);
    }
    if (verb == nullptr) {
        std::cout << app.help();
        return CommandLine(NothingCommand{});
    }
    if (verb == verbs.up) return CommandLine(std::move(raw.up));
    if (verb == verbs.run) return complete_run(verb, raw);
    if (verb == verbs.status) return CommandLine(std::move(raw.status));
    if (verb == verbs.down) return CommandLine(std::move(raw.down));
    if (verb == verbs.plan) return CommandLine(std::move(raw.plan));
    return CommandLine(std::move(raw.synth));
}

}  // namespace k3::launcher
