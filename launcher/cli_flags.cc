#include "launcher/cli_flags.h"

#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstdlib>
#include <limits>
#include <utility>
#include <vector>

#include "common/base/settings.h"
#include "launcher/preset.h"

namespace k3::launcher {

namespace {

constexpr const char* kAbout = "Runs Kimi K3 on CPUs as a pipeline of cooperating processes.";

constexpr const char* kExamples =
    "Examples:\n"
    "  k3pipe run -p \"The capital of France is\"      start the demo, answer, stop\n"
    "  k3pipe up -c pipeline.toml                     start and watch until Ctrl-C\n"
    "  k3pipe run --attach -p \"Hello\"                 ask the pipeline that runs\n"
    "  k3pipe status                                  what runs, stage by stage\n"
    "  k3pipe plan -c pipeline.toml                   what would start, and its memory\n\n"
    "k3pipe VERB --help lists the flags of a verb.\n";

constexpr const char* kRunAbout =
    "Generate a continuation or an answer.\n"
    "The text goes to stdout as it comes, the rest to stderr. Starts a pipeline of its own and "
    "stops\n"
    "it afterwards, unless told to use a running one.";

constexpr const char* kRunExamples =
    "Examples:\n"
    "  k3pipe run -p \"The capital of France is\"\n"
    "  k3pipe run --chat -p \"What is 8 + 9?\" --effort low\n"
    "  k3pipe run -f prompt.txt --temperature 0.7 --seed 1 --max-tokens 200\n"
    "  k3pipe run -f book.txt --max-tokens 1 --save-session book.session\n"
    "  k3pipe run --attach -p \"Hello\" --json\n";

constexpr const char* kPackAbout =
    "Copy a checkpoint's trunk or experts into one file for direct reads.\n"
    "Every byte is checksummed; a server then needs no other weights than its own. What was\n"
    "interrupted goes on when the same command is run again.";

constexpr const char* kPackExamples =
    "Examples:\n"
    "  k3pipe pack trunk /models/k3 /fast/trunk.k3pack\n"
    "  k3pipe pack trunk /models/k3 /fast/trunk-0.k3pack --layers 0-45\n"
    "  k3pipe pack experts /models/k3 /fast/experts-0.k3pack --share 0/3\n";

constexpr const char* kKeysAbout =
    "Make the keys by which the processes of a pipeline on several boxes know each other.\n"
    "Written to the file that keys in [pipeline] names, otherwise to\n"
    "${XDG_CONFIG_HOME:-~/.config}/k3pipe/keys/NAME.keys. Prints its name and the fingerprint.";

constexpr const char* kRenderAbout =
    "Write a pipeline as units for systemd or as manifests for Kubernetes.\n"
    "The services are started with the command lines that k3pipe plan prints, and limited to the\n"
    "memory that it counts. Keys are referred to, never contained.";

constexpr const char* kRenderExamples =
    "Examples:\n"
    "  k3pipe render systemd -c k3.toml --out /etc/systemd/system\n"
    "  k3pipe render systemd -c k3.toml --user --out ~/.config/systemd/user\n"
    "  k3pipe render kubernetes -c k3.toml --image registry/k3pipe:1 | kubectl apply -f -\n";

constexpr const char* kVerifyAbout =
    "Compare every byte of a checkpoint or a pack with its checksums.\n"
    "A checkpoint has none of its own: --record writes a manifest of files that are known to be\n"
    "right, and --sha256 compares with the sums that its publisher gives. Goes on where it was\n"
    "interrupted.";

constexpr const char* kVerifyExamples =
    "Examples:\n"
    "  k3pipe verify /models/k3                            against its manifest, if it has one\n"
    "  k3pipe verify /models/k3 --sha256 SHA256SUMS --record\n"
    "  k3pipe verify /fast/trunk.k3pack\n";

/// One line for each verb; the rest of its description is its own --help.
class HelpFormatter final : public CLI::Formatter {
  public:
    HelpFormatter() { column_width(34); }
    /// Without the empty lines that CLI11 puts in pairs.
    std::string make_help(const CLI::App* app, std::string name,
                          CLI::AppFormatMode mode) const override {
        std::string text = Formatter::make_help(app, std::move(name), mode);
        for (std::size_t at = 0; (at = text.find("\n\n\n", at)) != std::string::npos;)
            text.erase(at, 1);
        return text;
    }
    std::string make_usage(const CLI::App* app, std::string name) const override {
        if (!app->get_subcommands({}).empty()) return "\nUsage: k3pipe VERB [FLAGS]\n";
        std::string words;
        for (const CLI::Option* option : app->get_options())
            if (option->get_positional())
                words += option->get_required() ? fmt::format(" {}", option->get_name())
                                                : fmt::format(" [{}]", option->get_name());
        return fmt::format("\nUsage: {} [FLAGS]{}\n", name, words);
    }
    std::string make_subcommand(const CLI::App* verb) const override {
        std::string about = verb->get_description();
        return fmt::format("  {:<10}{}\n", verb->get_name(), about.substr(0, about.find('\n')));
    }
};

CLI::Validator whole_number(std::uint64_t max) {
    auto check = [max](std::string& text) -> std::string {
        std::uint64_t number = 0;
        auto [end, code] = std::from_chars(text.data(), text.data() + text.size(), number);
        if (code == std::errc{} && end == text.data() + text.size() && number <= max) return "";
        return fmt::format("'{}' is not a whole number from 0 to {}", text, max);
    };
    return {check, ""};
}

CLI::Validator positive(std::uint64_t max) {
    CLI::Validator up_to = whole_number(max);
    auto check = [up_to, max](std::string& text) -> std::string {
        if (up_to(text).empty() && std::strtoull(text.c_str(), nullptr, 10) > 0) return "";
        return fmt::format("'{}' is not a whole number from 1 to {}", text, max);
    };
    return {check, ""};
}

CLI::Validator any_number() {
    auto check = [](std::string& text) -> std::string {
        float number = 0;
        auto [end, code] = std::from_chars(text.data(), text.data() + text.size(), number);
        if (end != text.data() + text.size() || text.empty())
            return fmt::format("'{}' is not a number", text);
        if (code == std::errc{}) return "";
        // Out of the range of fp32. What is nearer to 0 than its smallest is 0 in it.
        if (std::abs(std::strtod(text.c_str(), nullptr)) > 1)
            return fmt::format("'{}' is beyond the largest number, 3.4e38", text);
        text = "0";
        return "";
    };
    return {check, ""};
}

CLI::Validator one_of(std::vector<std::string> choices) {
    auto check = [choices = std::move(choices)](std::string& text) -> std::string {
        if (std::find(choices.begin(), choices.end(), text) != choices.end()) return "";
        return fmt::format("'{}' is not one of {}", text, fmt::join(choices, ", "));
    };
    return {check, ""};
}

/// "1.2GB" becomes 1200000000.
CLI::Validator size_in_bytes() {
    auto convert = [](std::string& text) -> std::string {
        const auto bytes = parse_bytes(text);
        if (!bytes.has_value()) return bytes.error().sentence();
        text = std::to_string(*bytes);
        return "";
    };
    return {convert, ""};
}

CLI::Validator count() { return whole_number(std::numeric_limits<std::uint32_t>::max()); }

void add_config(CLI::App* verb, std::filesystem::path* config, std::filesystem::path* run_dir) {
    verb->add_option("-c,--config", *config, "pipeline file [the shipped demo.toml]")
        ->option_text("FILE");
    verb->add_option("--run-dir", *run_dir,
                     "folder of run directories [${XDG_RUNTIME_DIR:-/tmp}/k3pipe-<uid>]")
        ->option_text("DIR");
}

void add_slurm(CLI::App* verb, bool* slurm) {
    verb->add_flag("--slurm", *slurm,
                   "expert servers and trunk stages run in a Slurm job: this one, or its own");
}

void add_run_dir(CLI::App* verb, std::filesystem::path* run_dir) {
    verb->add_option("--run-dir", *run_dir, "folder of run directories, as given to up")
        ->option_text("DIR");
}

void add_input(CLI::App* verb, RawCommands& raw) {
    RunCommand& run = raw.run;
    verb->option_defaults()->group("Prompt, exactly one of");
    verb->add_option("-p,--prompt", run.prompt, "the text to continue")->option_text("TEXT");
    verb->add_option("-f,--file", run.prompt_file, "read it from a file; - is standard input")
        ->option_text("FILE");
    verb->add_option("--ids", run.ids, "token ids instead of text: 1,2,3")->option_text("IDS");
    verb->add_option("--messages", run.messages,
                     "a conversation: a JSON list of messages, or an object with messages, tools, "
                     "thinking_effort, response_format")
        ->option_text("FILE.json");
    verb->option_defaults()->group("How the prompt is meant");
    verb->add_flag("--chat", run.chat, "the text is a user's message in a conversation");
    verb->add_option("--effort", raw.effort, "thinking before the answer in a chat [off]")
        ->check(one_of({"off", "low", "high", "max"}))
        ->option_text("off|low|high|max");
    verb->add_flag("--special", run.special,
                   "text that spells a special token becomes that token [it stays text]");
}

void add_sampling(CLI::App* verb, RunCommand& run) {
    verb->option_defaults()->group("Generation");
    msg::SamplingParams& params = run.params;
    verb->add_option("--max-tokens", run.max_tokens,
                     "stop after so many tokens; 0: at a stop or the end of the context [256]")
        ->option_text("N")
        ->check(count());
    verb->add_option("--temperature", params.temperature,
                     "0 is greedy: always the likeliest token [0, or 1 with any filter below]")
        ->option_text("T")
        ->transform(any_number());
    verb->add_option("--top-k", params.top_k, "only the K likeliest [off]")
        ->option_text("K")
        ->check(count());
    verb->add_option("--top-p", params.top_p, "only the likeliest that sum to P [off]")
        ->option_text("P")
        ->transform(any_number());
    verb->add_option("--min-p", params.min_p, "only those with P times the largest [off]")
        ->option_text("P")
        ->transform(any_number());
    verb->add_option("--repetition-penalty", params.repetition_penalty, "of seen tokens [1: off]")
        ->option_text("X")
        ->transform(any_number());
    verb->add_option("--presence-penalty", params.presence_penalty, "of generated tokens [0: off]")
        ->option_text("X")
        ->transform(any_number());
    verb->add_option("--frequency-penalty", params.frequency_penalty,
                     "for each time a token was generated [0: off]")
        ->option_text("X")
        ->transform(any_number());
    verb->add_option("--seed", params.seed, "of the random choices [a new one, which is printed]")
        ->option_text("N")
        ->check(whole_number(std::numeric_limits<std::uint64_t>::max()));
    verb->add_option("--stop", run.stops, "end before this text; may be given several times")
        ->expected(1)
        ->multi_option_policy(CLI::MultiOptionPolicy::TakeAll)
        ->option_text("TEXT");
    verb->add_flag("--ignore-eos", run.ignore_eos, "go on after the model's own stop tokens");
}

void add_sessions(CLI::App* verb, RunCommand& run) {
    verb->option_defaults()->group("Session");
    verb->add_option("--session", run.session,
                     "go on from a saved session: the prompt begins with its text, which is not "
                     "computed again")
        ->option_text("FILE");
    verb->add_option("--save-session", run.save_session,
                     "save the state after the answer, to go on from it later")
        ->option_text("FILE");
}

void add_output(CLI::App* verb, RawCommands& raw) {
    RunCommand& run = raw.run;
    verb->option_defaults()->group("Output");
    verb->add_flag("--json", run.json,
                   "JSON lines on stdout: accepted, tokens..., and last finished with everything");
    verb->add_option("--logprobs", run.n_logprobs, "with --json: so many alternatives per token")
        ->option_text("N")
        ->check(count());
    verb->add_flag("--raw", run.raw, "in a chat, print the markers of the chat format too");
    verb->add_option("--logits-out", run.logits_out,
                     "write the logits of every generated token: .npy, [n, vocab_size] float32")
        ->option_text("FILE");
    verb->add_flag("--prompt-logits", run.prompt_logits,
                   "with --logits-out: those of every prompt position first");
    verb->add_flag("-v,--verbose", run.verbose, "also print what the services log");
    verb->option_defaults()->group("Pipeline");
    add_config(verb, &run.config, &run.run_dir);
    add_slurm(verb, &run.slurm);
    verb->add_option("--attach", raw.attach, "use a running pipeline [the only one]")
        ->expected(0, 1)
        ->option_text("[NAME]");
    verb->add_option("--gateway", run.gateway, "use the gateway at this endpoint")
        ->option_text("ENDPOINT");
    verb->add_option("--keys", run.keys,
                     "with --gateway: key file of its pipeline, if it has one; with --attach: "
                     "another than the pipeline was started with")
        ->option_text("FILE");
}

void add_synth(CLI::App* verb, SynthCommand& synth) {
    model::SyntheticOptions& options = synth.options;
    verb->add_option("directory", synth.directory, "where; it must not exist yet")
        ->required()
        ->option_text(" ");
    verb->add_option("--layers", options.n_layers, "4 to 93 [5]")->option_text("N")->check(count());
    verb->add_option("--experts", options.n_experts, "of a layer: 16 to 896 [64]")
        ->option_text("N")
        ->check(count());
    verb->add_option("--vocab", options.vocab_size, "vocabulary rows: 512 to 163840 [4096]")
        ->option_text("N")
        ->check(count());
    verb->add_option("--seed", options.seed, "of the random weights [1]")
        ->option_text("N")
        ->check(whole_number(std::numeric_limits<std::uint64_t>::max()));
    verb->add_flag(
        "--sparse", options.sparse,
        "all released files with real headers and without data: 1.56 TB that take 150 MB");
}

void add_pack(CLI::App* verb, RawCommands& raw) {
    PackCommand& pack = raw.pack;
    verb->add_option("kind", raw.pack_kind, "trunk or experts")
        ->required()
        ->check(one_of({"trunk", "experts"}))
        ->option_text(" ");
    verb->add_option("model", pack.model, "directory of the checkpoint")
        ->required()
        ->option_text(" ");
    verb->add_option("file", pack.file, "to write; it must not exist yet")
        ->required()
        ->option_text(" ");
    verb->add_option("--layers", pack.layers, "trunk: all, or first-last [all]")
        ->option_text("A-B");
    verb->add_option("--part", raw.pack_part,
                     "trunk: every N-th stripe, for a file on each of N disks [all]")
        ->option_text("I/N");
    verb->add_option("--share", pack.share, "experts: all, or every N-th, as k3-experts takes it")
        ->option_text("I/N");
    verb->add_option("--list", raw.pack_list,
                     "experts: spelled out, 'layers 1-4 experts 0-7; layers 5 experts 8,9'")
        ->option_text("LIST");
}

void add_verify(CLI::App* verb, VerifyCommand& verify) {
    verb->add_option("path", verify.path, "directory of a checkpoint, or a pack")
        ->required()
        ->option_text(" ");
    verb->add_flag("--record", verify.record,
                   "write the manifest: checksums of what lies there now, beside it");
    verb->add_option("--sha256", verify.sha256,
                     "compare the files with these sums, lines as sha256sum writes them")
        ->option_text("FILE");
}

void add_simulation(CLI::App* verb, PlanCommand& plan) {
    verb->option_defaults()->group("Simulation");
    verb->add_option("--simulate", plan.simulate,
                     "replay a recorded routing over the expert servers: bytes, imbalance, seconds")
        ->option_text("TRACE.csv");
    verb->add_option("--rows", plan.rows, "positions of the trace in each step [1]")
        ->option_text("N")
        ->check(positive(65536));
    verb->add_option("--boxes", plan.boxes, "compare up to so many equal boxes [16]")
        ->option_text("N")
        ->check(positive(64));
    verb->add_option(
            "--link-rate", plan.link_rate,
            "bytes per second of a box's link, where its table has no link_rate [no limit]")
        ->option_text("BYTES")
        ->transform(size_in_bytes());
    verb->add_option("--round-trip-us", plan.round_trip_us,
                     "of a box, where its table has no round_trip_us [0]")
        ->option_text("US")
        ->check(count());
}

void add_placement(CLI::App* verb, PlacementCommand& placement) {
    verb->add_option("-c,--config", placement.config, "pipeline file [the shipped demo.toml]")
        ->option_text("FILE");
    verb->add_option("--out", placement.out, "write the placement to this file [only show it]")
        ->option_text("FILE");
    verb->add_option("--replicas", placement.replicas, "servers that hold an expert [1]")
        ->option_text("R")
        ->check(positive(64));
    verb->add_option("--replicated", placement.replicated,
                     "with --trace: only this part of each layer's experts, those used most [1]")
        ->option_text("PART")
        ->check(any_number());
    verb->add_option(
            "--trace", placement.trace,
            "a recorded routing: experts that were picked together go to different servers")
        ->option_text("FILE.csv");
}

void add_render(CLI::App* verb, RawCommands& raw) {
    RenderCommand& render = raw.render;
    verb->add_option("kind", raw.render_kind, "systemd or kubernetes")
        ->required()
        ->check(one_of({"systemd", "kubernetes"}))
        ->option_text(" ");
    verb->add_option("-c,--config", render.config, "pipeline file [the shipped demo.toml]")
        ->option_text("FILE");
    verb->add_option("--name", render.name, "call it so [name in the file]")->option_text("NAME");
    verb->add_option("--out", render.out, "write files into this folder [to standard output]")
        ->option_text("DIR");
    verb->add_option("--programs", render.programs,
                     "folder of k3pipe and the services there [systemd: where ours lie; "
                     "kubernetes: PATH of the image]")
        ->option_text("DIR");
    verb->option_defaults()->group("systemd");
    verb->add_flag("--user", render.user_units, "units for systemctl --user, of this user");
    verb->add_option("--account", render.account, "user whose processes they are [this one]")
        ->option_text("USER");
    verb->option_defaults()->group("kubernetes");
    verb->add_option("--image", render.image, "container image with k3pipe and the services")
        ->option_text("IMAGE");
    verb->add_option("--keys-secret", render.keys_secret,
                     "secret with the key file as its entry 'keys' [k3pipe-NAME-keys]")
        ->option_text("SECRET");
    verb->add_option("--model-claim", render.model_claim,
                     "persistent volume claim with the checkpoint [a folder of the node]")
        ->option_text("CLAIM");
}

void add_probe(CLI::App* verb, ProbeCommand& probe) {
    verb->add_option("endpoint", probe.endpoint, "ipc:///folder/name.sock or tcp://address:port")
        ->required()
        ->option_text(" ");
    verb->add_flag("--alive", probe.alive, "it answers, be it still loading [it must be ready]");
    verb->add_option("--keys", probe.keys, "key file of its pipeline, if it has one")
        ->option_text("FILE");
    verb->add_option("--wait-ms", probe.wait_ms, "how long it may take to answer [3000]")
        ->option_text("MS")
        ->check(count());
}

void add_examples(CLI::App* verb, std::string text) { verb->footer(fmt::format("\n{}", text)); }

/// Of a box that reads from packs.
void add_packs(CLI::App* verb, ModelFiles& files) {
    verb->add_option("--trunk-pack", files.trunk_pack,
                     "the trunk is read from this pack, once for each part [checkpoint]")
        ->allow_extra_args(false)
        ->option_text("FILE");
    verb->add_option("--experts-pack", files.experts_pack,
                     "the experts are read from this pack [checkpoint]")
        ->option_text("FILE");
}

void declare_verbs(CLI::App& app, RawCommands& raw, Verbs* verbs) {
    verbs->run = app.add_subcommand("run", kRunAbout);
    add_examples(verbs->run, kRunExamples);
    add_input(verbs->run, raw);
    add_sampling(verbs->run, raw.run);
    add_sessions(verbs->run, raw.run);
    add_output(verbs->run, raw);

    verbs->up = app.add_subcommand("up",
                                   "Start a pipeline and watch it until Ctrl-C or `k3pipe "
                                   "down`.");
    add_examples(verbs->up, "Example: k3pipe up -c configs/tiny-three-experts.toml\n");
    add_config(verbs->up, &raw.up.config, &raw.up.run_dir);
    add_slurm(verbs->up, &raw.up.slurm);
    verbs->up->add_option("--name", raw.up.name, "call it so [name in the file]")
        ->option_text("NAME");
    verbs->up->add_flag("-v,--verbose", raw.up.verbose, "also print what the services log");

    verbs->status = app.add_subcommand("status", "Show what runs, stage by stage.");
    add_examples(verbs->status, "Example: k3pipe status demo\n");
    verbs->status->add_option("name", raw.status.name, "only this pipeline [all]")
        ->option_text(" ");
    verbs->status->add_flag("--json", raw.status.json, "as JSON");
    add_run_dir(verbs->status, &raw.status.run_dir);

    verbs->down = app.add_subcommand("down", "Stop a running pipeline and wait until it is gone.");
    add_examples(verbs->down, "Example: k3pipe down demo\n");
    verbs->down->add_option("name", raw.down.name, "which one [the only one]")->option_text(" ");
    add_run_dir(verbs->down, &raw.down.run_dir);

    verbs->plan = app.add_subcommand(
        "plan", "Show what would be started: command lines to copy, memory, seconds per token.");
    add_examples(verbs->plan, "Example: k3pipe plan -c configs/demo.toml\n");
    add_config(verbs->plan, &raw.plan.config, &raw.plan.run_dir);
    verbs->plan->add_option("--name", raw.plan.name, "call it so [name in the file]")
        ->option_text("NAME");
    verbs->plan
        ->add_option("--disk-rate", raw.plan.disk_rate,
                     "bytes per second of the checkpoint's disk [measured]")
        ->option_text("BYTES")
        ->transform(size_in_bytes());
    verbs->plan
        ->add_option("--memory-rate", raw.plan.memory_rate, "bytes per second of memory [measured]")
        ->option_text("BYTES")
        ->transform(size_in_bytes());

    add_simulation(verbs->plan, raw.plan);

    verbs->placement = app.add_subcommand(
        "placement", "Decide which expert server holds which experts, or show it.");
    add_examples(verbs->placement,
                 "Examples:\n"
                 "  k3pipe placement -c boxes.toml                         what each server holds\n"
                 "  k3pipe placement -c boxes.toml --replicas 2 --out boxes.placement\n"
                 "  k3pipe placement -c boxes.toml --trace routing.csv --out boxes.placement\n"
                 "Then: placement = \"boxes.placement\" in [pipeline].\n");
    add_placement(verbs->placement, raw.placement);

    verbs->init = app.add_subcommand(
        "init", "Write a pipeline file with budgets for the memory of this or another box.");
    add_examples(verbs->init, "Example: k3pipe init MODEL --preset 32g -o k3.toml\n");
    verbs->init
        ->add_option("model", raw.init.files.directory,
                     "directory of the checkpoint; with both packs config and tokenizer are enough")
        ->required()
        ->option_text(" ");
    add_packs(verbs->init, raw.init.files);
    verbs->init->add_option("--preset", raw.init.preset, "memory of all processes together [auto]")
        ->check(one_of(preset_names()))
        ->option_text("auto|8g|16g|32g|64g|128g|max");
    verbs->init->add_option("-o,--output", raw.init.output, "write it here [standard output]")
        ->option_text("FILE");

    verbs->doctor = app.add_subcommand(
        "doctor", "Check machine, disk and checkpoint, and advise on a configuration.");
    add_examples(verbs->doctor,
                 "Examples:\n"
                 "  k3pipe doctor MODEL\n"
                 "  k3pipe doctor DIR --trunk-pack trunk.k3pack --experts-pack experts.k3pack\n"
                 "  k3pipe doctor -c pipeline.toml\n");
    verbs->doctor
        ->add_option("model", raw.doctor.files.directory, "directory of the checkpoint [none]")
        ->option_text(" ");
    add_packs(verbs->doctor, raw.doctor.files);
    verbs->doctor
        ->add_option("-c,--config", raw.doctor.config,
                     "pipeline file; its checkpoint and packs are looked at")
        ->option_text("FILE");

    verbs->keys = app.add_subcommand("keys", kKeysAbout);
    add_examples(verbs->keys, "Example: k3pipe keys -c pipeline.toml\n");
    verbs->keys->add_option("-c,--config", raw.keys.config, "pipeline file [the shipped demo.toml]")
        ->option_text("FILE");
    verbs->keys->add_option("--name", raw.keys.name, "of a pipeline called so [name in the file]")
        ->option_text("NAME");
    verbs->keys->add_flag("--replace", raw.keys.replace,
                          "make new keys where there are some: every box needs the new ones then");

    verbs->render = app.add_subcommand("render", kRenderAbout);
    add_examples(verbs->render, kRenderExamples);
    add_render(verbs->render, raw);

    verbs->probe = app.add_subcommand(
        "probe", "Ask one service whether it is ready: exit code 0 if it is, 5 if not.");
    add_examples(verbs->probe, "Example: k3pipe probe tcp://127.0.0.1:5800 --keys demo.keys\n");
    add_probe(verbs->probe, raw.probe);

    verbs->synth = app.add_subcommand(
        "synth", "Write a checkpoint of random weights in the released layout, for benchmarks.");
    add_examples(verbs->synth,
                 "Examples:\n"
                 "  k3pipe synth /var/tmp/k3-synthetic         11.5 GB\n"
                 "  k3pipe synth --sparse /var/tmp/k3-sparse   to plan with\n");
    add_synth(verbs->synth, raw.synth);

    verbs->pack = app.add_subcommand("pack", kPackAbout);
    add_examples(verbs->pack, kPackExamples);
    add_pack(verbs->pack, raw);

    verbs->verify = app.add_subcommand("verify", kVerifyAbout);
    add_examples(verbs->verify, kVerifyExamples);
    add_verify(verbs->verify, raw.verify);
}

}  // namespace

std::unique_ptr<CLI::App> declare_command_line(RawCommands& raw, Verbs* verbs) {
    auto app = std::make_unique<CLI::App>(kAbout, "k3pipe");
    app->formatter(std::make_shared<HelpFormatter>());
    app->footer(fmt::format("\n{}", kExamples));
    declare_verbs(*app, raw, verbs);
    for (CLI::App* verb : app->get_subcommands({})) {
        verb->allow_extras();
        verb->group("Verbs");
        // Listed last: everything else is what people look for.
        verb->set_help_flag();
        verb->option_defaults()->group("Other");
        verb->set_help_flag("-h,--help", "print this");
    }
    app->set_help_flag("-h,--help", "print this");
    app->set_version_flag("--version", fmt::format("k3pipe {}", version()), "print the version");
    app->allow_extras();
    return app;
}

}  // namespace k3::launcher
