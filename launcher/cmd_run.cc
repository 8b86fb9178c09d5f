// `k3pipe run`: one request, through a pipeline of its own or one that runs.

#include <fmt/format.h>
#include <unistd.h>

#include <charconv>
#include <cstring>
#include <fstream>
#include <iostream>
#include <random>
#include <thread>

#include "common/base/memory.h"
#include "common/base/settings.h"
#include "common/model/sampling_params.h"
#include "common/model/session_name.h"
#include "common/transport/curve_keys.h"
#include "common/transport/endpoint.h"
#include "common/transport/messages/envelope.h"
#include "launcher/commands.h"
#include "launcher/endpoint_probe.h"
#include "launcher/gateway_client.h"
#include "launcher/run_output.h"
#include "launcher/session.h"

namespace k3::launcher {

namespace {

constexpr std::int64_t kProbeMs = 2000;    // for a host to react at all
constexpr std::int64_t kGatewayMs = 5000;  // for a gateway to be ready

/// At most what one message can carry: a longer prompt fits no context.
Result<std::string> read_all(const std::filesystem::path& path) {
    const bool standard_input = path == "-";
    std::error_code code;
    std::ifstream file;
    if (!standard_input && !std::filesystem::is_directory(path, code))
        file.open(path, std::ios::binary);
    std::istream& in = standard_input ? std::cin : file;
    if (!standard_input && !file.is_open())
        return Error{ErrorCode::invalid_argument,
                     fmt::format("cannot read {}: {}", path.string(),
                                 std::filesystem::exists(path, code) ? "not a readable file"
                                                                     : "it does not exist"),
                     "check the path"};
    std::string text(msg::kMaxTextBytes + 1, '\0');
    in.read(text.data(), static_cast<std::streamsize>(text.size()));
    text.resize(static_cast<std::size_t>(in.gcount()));
    if (in.bad())
        return Error{ErrorCode::io,
                     fmt::format("{} cannot be read beyond its first {} bytes",
                                 standard_input ? "standard input" : path.string(), text.size()),
                     "check the disk it lies on"};
    if (text.size() > msg::kMaxTextBytes)
        return Error{
            ErrorCode::invalid_argument,
            fmt::format("{} holds more than {} bytes, the most that a prompt may have",
                        standard_input ? "standard input" : path.string(), msg::kMaxTextBytes),
            "give a shorter prompt"};
    return text;
}

Result<std::vector<std::uint32_t>> parse_ids(std::string_view text) {
    std::vector<std::uint32_t> ids;
    while (!text.empty()) {
        std::size_t end = std::min(text.find(','), text.size());
        std::string_view word = text.substr(0, end);
        while (!word.empty() && word.front() == ' ') word.remove_prefix(1);
        while (!word.empty() && word.back() == ' ') word.remove_suffix(1);
        std::uint32_t id = 0;
        auto [stop, code] = std::from_chars(word.data(), word.data() + word.size(), id);
        if (code != std::errc{} || stop != word.data() + word.size())
            return Error{
                ErrorCode::invalid_argument,
                fmt::format("--ids: '{}' (number {}) is not a token id", word, ids.size() + 1),
                "write whole numbers with commas between them: 1,2,3"};
        ids.push_back(id);
        text.remove_prefix(std::min(end + 1, text.size()));
    }
    return ids;
}

std::string effort_text(Effort effort) {
    switch (effort) {
        case Effort::off:
            return "";
        case Effort::low:
            return "low";
        case Effort::high:
            return "high";
        case Effort::max:
            return "max";
    }
    return "";
}

/// The request, and what the text output needs to know about its prompt.
struct Prepared {
    msg::Submit submit;
    std::filesystem::path session_dir;  // of a pipeline of its own; empty: no session is meant
    std::string echo;
    std::optional<std::string> channel;
};

Error empty_prompt() {
    return Error{ErrorCode::invalid_argument, "the prompt is empty",
                 "give at least one character, or one id"};
}

Status check_prompt(const std::string& text) {
    return text.empty() ? Status(empty_prompt()) : check_utf8(text, "the prompt");
}

/// True if FILE was saved, by one trunk stage or by several with layers in their names.
bool is_saved_session(const std::filesystem::path& file) {
    std::error_code code;
    if (std::filesystem::exists(file, code)) return true;
    const std::string part = file.filename().string() + std::string(model::kSessionLayersMark);
    for (std::filesystem::directory_iterator at(file.parent_path(), code), end; !code && at != end;
         at.increment(code))
        if (at->path().filename().string().starts_with(part)) return true;
    return false;
}

/// A session of a pipeline of one's own is a file of one's own. One that runs keeps its sessions
/// where its session_dir says, and a client can only name them.
Status prepare_session(const std::string& flag, const std::filesystem::path& file, bool is_attached,
                       std::string* name, std::filesystem::path* session_dir) {
    if (file.empty()) return Status::ok();
    auto refuse = [&flag](std::string message, std::string remedy) {
        return Error{ErrorCode::invalid_argument, flag + ": " + std::move(message),
                     std::move(remedy)};
    };
    *name = file.filename().string();
    if (is_attached && file.has_parent_path())
        return refuse(fmt::format("{} is a path, and a running pipeline keeps its sessions in a "
                                  "directory of its own",
                                  file.string()),
                      fmt::format("give a name without slashes: {}", *name));
    if (Status legal = model::check_session_name(*name); !legal.has_value())
        return std::move(legal).error().with_context(flag);
    if (is_attached) return Status::ok();
    std::error_code code;
    const std::filesystem::path folder = std::filesystem::absolute(file, code).parent_path();
    if (!std::filesystem::is_directory(folder, code))
        return refuse(fmt::format("there is no folder {}", folder.string()), "make it first");
    if (flag == "--session" && !is_saved_session(folder / *name))
        return refuse(fmt::format("{} does not exist", (folder / *name).string()),
                      "save it first, with --save-session");
    if (!session_dir->empty() && !std::filesystem::equivalent(*session_dir, folder, code))
        return refuse(fmt::format("{} is in another folder than {}", (folder / *name).string(),
                                  session_dir->string()),
                      "keep both sessions in one folder");
    *session_dir = folder;
    return Status::ok();
}

/// Whatever can be refused without a pipeline is: starting one may take minutes.
Result<Prepared> prepare(const RunCommand& command) {
    Prepared prepared;
    msg::Submit& submit = prepared.submit;
    if (command.ids.has_value()) {
        ASSIGN_OR_RETURN(std::vector<std::uint32_t> ids, parse_ids(*command.ids));
        if (ids.empty()) return empty_prompt();
        submit.input = msg::IdsInput{std::move(ids)};
    } else if (command.messages.has_value()) {
        ASSIGN_OR_RETURN(std::string text, read_all(*command.messages));
        ASSIGN_OR_RETURN(std::string chat, chat_of_json(text, effort_text(command.effort),
                                                        command.messages->string()));
        prepared.channel = opened_channel(chat);
        submit.input = msg::ChatInput{std::move(chat)};
    } else {
        std::string text;
        if (command.prompt.has_value()) {
            text = *command.prompt;
        } else {
            ASSIGN_OR_RETURN(text, read_all(*command.prompt_file));
        }
        if (command.chat) {
            ASSIGN_OR_RETURN(std::string chat, chat_of_text(text, effort_text(command.effort)));
            prepared.channel = opened_channel(chat);
            submit.input = msg::ChatInput{std::move(chat)};
        } else {
            RETURN_IF_ERROR(check_prompt(text));
            prepared.echo = text;
            submit.input = msg::TextInput{std::move(text)};
            submit.recognise_specials = command.special;
        }
    }
    RETURN_IF_ERROR(model::check_sampling_params(command.params));
    RETURN_IF_ERROR(model::check_n_logprobs(command.n_logprobs));
    submit.params = command.params;
    submit.max_tokens = command.max_tokens;
    for (const std::string& stop : command.stops) RETURN_IF_ERROR(check_utf8(stop, "--stop"));
    submit.stop_strings = command.stops;
    submit.ignore_eos = command.ignore_eos;
    submit.n_logprobs = command.n_logprobs;
    const bool is_attached = command.attach || !command.gateway.empty();
    RETURN_IF_ERROR(prepare_session("--session", command.session, is_attached, &submit.load_session,
                                    &prepared.session_dir));
    RETURN_IF_ERROR(prepare_session("--save-session", command.save_session, is_attached,
                                    &submit.save_session, &prepared.session_dir));
    if (!command.logits_out.empty())
        submit.want_logits =
            command.prompt_logits ? msg::WantLogits::all : msg::WantLogits::generated;
    return prepared;
}

void say_how_tokens_are_chosen(const RunCommand& command, msg::Submit* submit,
                               const EventLog& events) {
    if (command.greedy) {
        events.important("greedy: always the likeliest token (--temperature 1 samples)");
        return;
    }
    if (!command.seed_given) submit->params.seed = std::random_device{}();
    events.important(fmt::format("sampling with temperature {:g} and seed {}",
                                 submit->params.temperature, submit->params.seed));
}

void say_how_it_ended(const msg::Finished& finished, const RunCommand& command,
                      const EventLog& events) {
    std::string why;
    switch (finished.reason) {
        case msg::FinishReason::stop_id:
            why = fmt::format("the model ended it (id {})", finished.stop_id);
            break;
        case msg::FinishReason::stop_string:
            why = fmt::format("stop string '{}'", finished.stop_string);
            break;
        case msg::FinishReason::max_tokens:
            why = fmt::format("--max-tokens {} reached", command.max_tokens);
            break;
        case msg::FinishReason::context_full:
            why = "the context is full";
            break;
        case msg::FinishReason::cancelled:
            why = "cancelled";
            break;
    }
    double decode_s = static_cast<double>(finished.decode_ns) / 1e9;
    events.important(fmt::format(
        "{}; prompt {} tokens in {:.3f} s, answer {} tokens in {:.3f} s{}", why, finished.n_prompt,
        static_cast<double>(finished.prefill_ns) / 1e9, finished.n_generated, decode_s,
        decode_s > 0 ? fmt::format(" ({:.1f}/s)", finished.n_generated / decode_s) : ""));
}

/// Says on stderr what became of the sessions of a request, whatever its output is.
class SessionWatch final : public GenerationSink {
  public:
    SessionWatch(GenerationSink& output, const msg::Submit& submit, const EventLog& events)
        : output_(output),
          loaded_name_(submit.load_session),
          saved_name_(submit.save_session),
          events_(events) {}

    Status accepted(const msg::Accepted& accepted) override {
        n_prompt_ = accepted.prompt_ids.size();
        return output_.accepted(accepted);
    }
    Status session_loaded(const msg::SessionLoaded& loaded) override {
        events_.important(fmt::format("session '{}' {}", loaded_name_, use_of(loaded)));
        return output_.session_loaded(loaded);
    }
    void progress(const msg::PrefillProgress& progress) override { output_.progress(progress); }
    Status tokens(const msg::TokenEvent& event, std::span<const float> logits) override {
        return output_.tokens(event, logits);
    }
    Status session_saved(const msg::SessionSaved& saved) override {
        if (saved.failure.has_value())
            failure_ = saved.failure->error;
        else
            events_.important(fmt::format("session '{}' saved: {} tokens, {}", saved_name_,
                                          saved.n_ids, format_bytes(saved.bytes)));
        return output_.session_saved(saved);
    }

    /// Why the session was not saved.
    const std::optional<Error>& failure() const noexcept { return failure_; }

  private:
    std::string use_of(const msg::SessionLoaded& loaded) const {
        if (loaded.n_reused > 0)
            return fmt::format("has {} of the prompt's {} tokens", loaded.n_reused, n_prompt_);
        if (loaded.n_agreed == loaded.n_ids)
            return fmt::format(
                "has all {} tokens of the prompt and can only go on behind them: "
                "the prompt is computed from its beginning",
                loaded.n_ids);
        return fmt::format(
            "cannot be used: of its {} tokens the first {} are those of the prompt, "
            "which has {} and is computed from its beginning",
            loaded.n_ids, loaded.n_agreed, n_prompt_);
    }

    GenerationSink& output_;
    std::string loaded_name_;
    std::string saved_name_;
    const EventLog& events_;
    std::size_t n_prompt_ = 0;
    std::optional<Error> failure_;
};

/// Prints the error, except that of an interrupted request: its caller knows who interrupted it.
int report_failure(const Error& error) {
    return error.code == ErrorCode::cancelled ? kExitInterrupted : report(error);
}

/// Of what fails before there is a request: with --json it ends with an event all the same.
int report_start(const RunCommand& command, const Error& error) {
    if (command.json)
        if (Status told = JsonOutput(nullptr, std::nullopt).error(error); !told)
            return report(told.error());
    return report_failure(error);
}

struct Gateway {
    std::string endpoint;
    std::uint64_t run_id = 0;  // 0: of no run of ours
    std::shared_ptr<const transport::CurveKeys> keys;
};

/// Submits through `gateway` and prints what comes. Returns the exit code.
int generate(const RunCommand& command, Prepared prepared, const Gateway& gateway,
             const EventLog& events, const std::function<bool()>& give_up) {
    std::unique_ptr<LogitsFile> logits;
    if (!command.logits_out.empty()) {
        auto created = LogitsFile::create(command.logits_out);
        if (!created.has_value()) return report_start(command, created.error());
        logits = *std::move(created);
    }
    auto client = GatewayClient::connect(gateway.endpoint, gateway.run_id, gateway.keys,
                                         Deadline::after_ms(kGatewayMs), give_up);
    if (!client.has_value()) return report_start(command, client.error());
    say_how_tokens_are_chosen(command, &prepared.submit, events);
    if (client->facts().mla_bf16)
        events.important(
            "the trunk keeps MLA latents in bf16 (mla_cache): the output is not that of fp32");

    bool terminal = ::isatty(STDOUT_FILENO) != 0;
    TextOutput text({terminal ? prepared.echo : "", command.raw ? std::nullopt : prepared.channel,
                     logits.get(), terminal});
    JsonOutput json(logits.get(), command.raw ? std::nullopt : prepared.channel);
    GenerationSink& output = command.json ? static_cast<GenerationSink&>(json) : text;
    SessionWatch sink(output, prepared.submit, events);
    auto finished = client->generate(prepared.submit, sink, give_up);
    Status written = command.json ? Status::ok() : text.finish();
    if (!finished.has_value()) {
        if (command.json)
            if (Status told = json.error(finished.error()); !told) return report(told.error());
        return report_failure(finished.error());
    }
    if (command.json) written = json.finished(*finished);
    if (written && logits != nullptr) written = logits->finish(client->facts().vocab_size);
    if (!written) return report(written.error());
    say_how_it_ended(*finished, command, events);
    if (sink.failure().has_value()) return report(*sink.failure());
    return finished->reason == msg::FinishReason::cancelled ? kExitInterrupted : kExitOk;
}

/// A gateway of a running pipeline may be between two lives and is waited for; one that was named
/// by its endpoint is somebody else's affair, so nobody there is the answer.
Status check_gateway_listens(const std::string& endpoint) {
    if (auto parsed = transport::parse_endpoint(endpoint); !parsed.has_value())
        return std::move(parsed).error().with_context("--gateway");
    EndpointProbe probe = probe_endpoint(endpoint, kProbeMs);
    if (probe.finding == EndpointProbe::Finding::listening) return Status::ok();
    return Error{ErrorCode::unavailable,
                 fmt::format("no gateway answers at {}: {}", endpoint, probe.reason),
                 "start it first, or correct --gateway (k3pipe status shows what runs)"};
}

int run_attached(const RunCommand& command, Prepared prepared, const EventLog& events) {
    if (Status space = check_address_space(kLauncherAddressSpace); !space)
        return report_start(command, space.error());
    Gateway gateway;
    gateway.endpoint = command.gateway;
    std::string keys = command.keys.string();
    if (gateway.endpoint.empty()) {
        auto running = find_running(command.run_dir, command.attach_name, "--attach NAME");
        if (!running.has_value()) return report_start(command, running.error());
        gateway.endpoint = running->gateway;
        if (keys.empty()) keys = running->keys;
    } else if (Status listens = check_gateway_listens(gateway.endpoint); !listens) {
        return report_start(command, listens.error());
    }
    if (!keys.empty()) {
        auto loaded = transport::CurveKeys::load(keys);
        if (!loaded.has_value()) return report_start(command, loaded.error());
        gateway.keys = *std::move(loaded);
    }
    auto signals = StopSignals::take();
    if (!signals.has_value()) return report_start(command, signals.error());
    int code = generate(command, std::move(prepared), gateway, events,
                        [&signals] { return signals->came(); });
    if (signals->came()) events.important("interrupted");
    return code;
}

int run_alone(const RunCommand& command, Prepared prepared, const EventLog& events) {
    auto config = config_or_default(command.config);
    if (!config.has_value()) return report_start(command, config.error());
    Session::Options options;
    options.config = *config;
    options.run_dir = command.run_dir;
    options.unique_name = true;
    options.forward_errors = false;  // the request's error comes back with the request
    options.session_dir = prepared.session_dir;
    options.slurm = command.slurm;
    auto opened = Session::open(options, events);
    if (!opened.has_value()) return report_start(command, opened.error());
    std::unique_ptr<Session> session = *std::move(opened);
    Supervisor& supervisor = session->supervisor();
    Outcome outcome;
    std::thread loop([&] { outcome = supervisor.run(); });
    Status ready = supervisor.wait_ready();
    int code = kExitOk;
    if (ready.has_value())
        code = generate(command, std::move(prepared),
                        {session->gateway(), session->run_id(), session->keys()}, events,
                        [&supervisor] { return supervisor.stopping(); });
    supervisor.request_stop();
    loop.join();
    session.reset();
    if (!outcome.status.has_value())
        return ready.has_value() ? report(outcome.status.error())
                                 : report_start(command, outcome.status.error());
    if (!outcome.interrupted) return code;
    events.important("interrupted");
    return kExitInterrupted;
}

}  // namespace

int run(const RunCommand& command) {
    EventLog events(command.verbose ? EventLog::Detail::verbose : EventLog::Detail::brief);
    auto prepared = prepare(command);
    if (!prepared.has_value()) return report_start(command, prepared.error());
    if (command.attach || !command.gateway.empty())
        return run_attached(command, *std::move(prepared), events);
    return run_alone(command, *std::move(prepared), events);
}

}  // namespace k3::launcher
