// How long a step of the real pipeline takes, as a share of what this machine can do, and where the
// time goes.
//
// Starts `k3pipe up` on a pipeline file (or on one it writes for --model DIR), warms it up, then
// decodes and prefills through the gateway. What each service spent comes from its own counters,
// read before and after; the machine's limits are measured in the same run, before and after, while
// the pipeline idles: two figures that differ tell of a neighbour. With --one-process the same
// steps are then made by function calls: what the pipeline takes longer is the price of its
// processes. Without a checkpoint of released dimensions: `k3pipe synth DIR` writes one.
//
// --neighbour PAIRS also decodes in turns with and without a niced busy process beside the
// pipeline. It takes only what nobody else wants, and yet a step whose threads wait for one another
// at every product can lose far more than that: each of its slices stops them all.

#include <fcntl.h>
#include <fmt/format.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <atomic>
#include <csignal>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <thread>

#include "bench/machine.h"
#include "bench/memory_cap.h"
#include "bench/neighbour.h"
#include "bench/one_process.h"
#include "bench/streaming.h"
#include "common/base/cores.h"
#include "common/base/settings.h"
#include "common/kernels/kernel_table.h"
#include "common/model/load.h"
#include "common/model/token_cost.h"
#include "common/transport/channel.h"
#include "launcher/gateway_client.h"
#include "launcher/pipeline_file.h"
#include "launcher/run_directory.h"

extern char** environ;

namespace {

namespace fs = std::filesystem;
using namespace k3;

constexpr std::int64_t kAskMs = 10'000;

struct Options {
    fs::path config;
    fs::path model;
    std::string expert_cache = "4GiB";
    std::string trunk_weights = "0";
    std::string cap;  // bytes; empty: none
    std::uint32_t tokens = 16;
    std::uint32_t prompt = 64;
    int threads = 0;
    bool one_process = false;
    int start_s = 600;
    std::uint32_t neighbour_pairs = 0;
    fs::path json_file;
};

/// Thrown, so that the pipeline and the file of a run that fails are cleaned up on the way out.
struct Failure {
    std::string sentence;
};

[[noreturn]] void fail(std::string sentence) { throw Failure{std::move(sentence)}; }

void check(Status status) {
    if (!status.has_value()) fail(status.error().sentence());
}

template <typename T>
T value_or_fail(Result<T> result) {
    if (!result.has_value()) fail(result.error().sentence());
    return std::move(result).value();
}

std::atomic<pid_t> g_pipeline{-1};  // `k3pipe up`, while it runs

/// Whoever ends this program ends the pipeline, too.
extern "C" void end_with_pipeline(int number) {
    const pid_t pid = g_pipeline.load();
    if (pid > 0) {
        ::kill(pid, SIGINT);
        ::waitpid(pid, nullptr, 0);
    }
    ::_exit(128 + number);
}

/// `k3pipe up` in a process of its own, stopped at the end.
class RunningPipeline {
  public:
    /// `cap`: null, or what it and its services run in.
    RunningPipeline(const fs::path& program, const fs::path& config, const std::string& name,
                    const bench::MemoryCap* cap)
        : name_(name) {
        for (int number : {SIGINT, SIGTERM, SIGHUP}) ::signal(number, end_with_pipeline);
        std::string words[] = {program.string(), "up", "-c", config.string(), "--name", name};
        std::vector<char*> argv;
        for (std::string& word : words) argv.push_back(word.data());
        argv.push_back(nullptr);
        if (cap != nullptr) check(cap->enter());
        const int error =
            posix_spawn(&pid_, program.c_str(), nullptr, nullptr, argv.data(), environ);
        if (cap != nullptr) check(cap->leave());
        if (error != 0) fail(fmt::format("cannot start {}: {}", program.string(), strerror(error)));
        g_pipeline = pid_;
    }
    ~RunningPipeline() { stop(); }
    RunningPipeline(const RunningPipeline&) = delete;
    RunningPipeline& operator=(const RunningPipeline&) = delete;

    launcher::RunRecord wait_ready(int seconds) {
        for (const double end = bench::now() + seconds; bench::now() < end;) {
            int status = 0;
            if (waitpid(pid_, &status, WNOHANG) == pid_) {
                g_pipeline = pid_ = -1;
                fail("the pipeline did not start; its own message is above");
            }
            auto run = launcher::find_run(launcher::run_base({}), name_);
            if (run.has_value() && run->has_value() && (*run)->record.state == "ready")
                return (*run)->record;
            std::this_thread::sleep_for(std::chrono::milliseconds(50));
        }
        stop();
        fail(fmt::format("the pipeline is not ready after {} s; give it more with --start-s",
                         seconds));
    }

  private:
    void stop() {
        if (pid_ < 0) return;
        ::kill(pid_, SIGINT);
        ::waitpid(pid_, nullptr, 0);
        g_pipeline = pid_ = -1;
    }

    std::string name_;
    pid_t pid_ = -1;
};

using bench::Counts;

Counts read_counters(const launcher::RunRecord& record) {
    Counts counts;
    for (const launcher::StageRecord& stage : record.stages) {
        transport::Channel::Options options;
        options.endpoint = stage.endpoint;
        options.peer = stage.name;
        auto channel = value_or_fail(transport::Channel::create(std::move(options)));
        value_or_fail(channel->hello({}, Deadline::after_ms(kAskMs)));
        const auto statistics = value_or_fail(transport::expect<msg::Statistics>(
            channel->call(msg::GetStatistics{}, {}, Deadline::after_ms(kAskMs)), stage.name));
        for (const msg::Counter& counter : statistics.counters)
            counts[stage.kind + "." + counter.name] += counter.value;
    }
    return counts;
}

class NoOutput final : public launcher::GenerationSink {
  public:
    Status accepted(const msg::Accepted&) override { return Status::ok(); }
    void progress(const msg::PrefillProgress&) override {}
    Status tokens(const msg::TokenEvent&, std::span<const float>) override { return Status::ok(); }
};

msg::Finished generate(launcher::GatewayClient& client, std::uint32_t n_prompt,
                       std::uint32_t n_tokens) {
    msg::Submit submit;
    submit.input = msg::IdsInput{bench::bench_prompt(n_prompt)};
    submit.max_tokens = n_tokens;
    submit.ignore_eos = true;
    submit.params.temperature = 0;
    NoOutput sink;
    return value_or_fail(client.generate(submit, sink, [] { return false; }));
}

/// Seconds of one phase by who had them. The expert servers work while the trunk computes its
/// shared experts, so their time is not a summand but part of both.
struct Phase {
    std::string name;
    double wall_s = 0;
    std::uint64_t n_tokens = 0;
    double trunk_s = 0;           // the trunk's steps without waiting for experts
    double wait_s = 0;            // the trunk waiting for expert servers: compute, reads, exchange
    double expert_compute_s = 0;  // of the slowest server of each call
    double expert_read_s = 0;
    double sampler_s = 0;
    double rest_s = 0;        // gateway, tokenizer and the exchange between services
    double trunk_read_s = 0;  // the trunk waiting for its own weights, not in trunk_s
    Counts spent;
};

Phase measure(const std::string& name, const launcher::RunRecord& record,
              launcher::GatewayClient& client, std::uint32_t n_prompt, std::uint32_t n_tokens) {
    const Counts before = read_counters(record);
    const double start = bench::now();
    const msg::Finished finished = generate(client, n_prompt, n_tokens);
    Phase phase;
    phase.name = name;
    phase.wall_s = bench::now() - start;
    phase.n_tokens = std::max<std::uint64_t>(finished.n_generated, n_prompt);
    phase.spent = read_counters(record);
    for (const auto& [counter, value] : before) phase.spent[counter] -= value;
    const auto seconds = [&](const std::string& counter) {
        const auto at = phase.spent.find(counter);
        return at == phase.spent.end() ? 0.0 : static_cast<double>(at->second) / 1e9;
    };
    phase.wait_s = seconds("trunk.expert_wait_ns");
    phase.trunk_read_s = seconds("trunk.trunk_read_wait_ns");
    phase.trunk_s = seconds("trunk.step_ns") - phase.wait_s - phase.trunk_read_s;
    phase.expert_compute_s = seconds("trunk.expert_server_compute_ns");
    phase.expert_read_s = seconds("trunk.expert_server_read_ns");
    phase.sampler_s = seconds("sampler.compute_ns");
    phase.rest_s =
        phase.wall_s - phase.trunk_s - phase.trunk_read_s - phase.wait_s - phase.sampler_s;
    return phase;
}

nlohmann::json report(const Phase& phase) {
    const auto share = [&](double s) { return fmt::format("{:5.1f} %", 100 * s / phase.wall_s); };
    const auto line = [&](const char* what, double s) {
        fmt::print("  {:<44} {:9.2f} ms  {}\n", what, 1e3 * s / static_cast<double>(phase.n_tokens),
                   share(s));
    };
    fmt::print("\n{}: {} tokens in {:.3f} s, {:.2f} tokens/s; a token:\n", phase.name,
               phase.n_tokens, phase.wall_s, static_cast<double>(phase.n_tokens) / phase.wall_s);
    line("trunk kernels", phase.trunk_s);
    if (phase.trunk_read_s > 0) line("trunk waiting for its weights", phase.trunk_read_s);
    line("trunk waiting for experts", phase.wait_s);
    line("  (expert servers computing meanwhile)", phase.expert_compute_s);
    line("  (expert servers reading meanwhile)", phase.expert_read_s);
    line("sampler", phase.sampler_s);
    line("gateway, tokenizer, exchange", phase.rest_s);
    return {{"phase", phase.name},
            {"tokens", phase.n_tokens},
            {"wall_s", phase.wall_s},
            {"trunk_s", phase.trunk_s},
            {"trunk_read_s", phase.trunk_read_s},
            {"expert_wait_s", phase.wait_s},
            {"expert_compute_s", phase.expert_compute_s},
            {"expert_read_s", phase.expert_read_s},
            {"sampler_s", phase.sampler_s},
            {"rest_s", phase.rest_s}};
}

double median(std::vector<double> values) {
    std::sort(values.begin(), values.end());
    const std::size_t half = values.size() / 2;
    return values.size() % 2 == 1 ? values[half] : (values[half - 1] + values[half]) / 2;
}

/// Seconds of a decode, in turns: alone, beside the neighbour, beside it, alone, ...
struct Neighbourly {
    std::vector<double> alone_s;
    std::vector<double> beside_s;
    double ratio() const { return median(beside_s) / median(alone_s); }
};

double decode_seconds(launcher::GatewayClient& client, std::uint32_t n_tokens) {
    const double start = bench::now();
    generate(client, 1, n_tokens);
    return bench::now() - start;
}

double decode_beside_neighbour(launcher::GatewayClient& client, std::uint32_t n_tokens) {
    const bench::Neighbour neighbour;
    if (!neighbour.is_there()) fail("cannot start nice and sh for the neighbour");
    // It has been running for a while, as a neighbour has.
    std::this_thread::sleep_for(std::chrono::milliseconds(100));
    return decode_seconds(client, n_tokens);
}

Neighbourly measure_neighbour(launcher::GatewayClient& client, const Options& options) {
    Neighbourly out;
    for (std::uint32_t pair = 0; pair < options.neighbour_pairs; ++pair) {
        const bool is_first = pair % 2 == 1;
        if (is_first) out.beside_s.push_back(decode_beside_neighbour(client, options.tokens));
        out.alone_s.push_back(decode_seconds(client, options.tokens));
        if (!is_first) out.beside_s.push_back(decode_beside_neighbour(client, options.tokens));
    }
    return out;
}

nlohmann::json report(const Neighbourly& measured, std::uint32_t n_tokens) {
    const auto line = [&](const char* what, const std::vector<double>& seconds) {
        const auto [least, most] = std::minmax_element(seconds.begin(), seconds.end());
        const double ms = 1e3 / n_tokens;
        fmt::print("  {:<44} {:9.2f} ms  ({:.2f} to {:.2f})\n", what, ms * median(seconds),
                   ms * *least, ms * *most);
    };
    fmt::print("\ndecode of {} tokens, {} times with and without a niced busy process; a token:\n",
               n_tokens, measured.alone_s.size());
    line("alone, median", measured.alone_s);
    line("beside it", measured.beside_s);
    fmt::print("  beside it / alone {:36.2f}\n", measured.ratio());
    return {{"tokens", n_tokens},
            {"alone_s", measured.alone_s},
            {"beside_s", measured.beside_s},
            {"ratio", measured.ratio()}};
}

/// The pipeline file that --model stands for; gone with this object.
class PipelineFile {
  public:
    explicit PipelineFile(const Options& options) { write(options); }
    ~PipelineFile() {
        std::error_code ignored;
        fs::remove(path_, ignored);
    }
    PipelineFile(const PipelineFile&) = delete;
    PipelineFile& operator=(const PipelineFile&) = delete;

    const fs::path& path() const noexcept { return path_; }

  private:
    void write(const Options& options) const;

    fs::path path_ = fs::temp_directory_path() / fmt::format("k3-step-{}.toml", ::getpid());
};

void PipelineFile::write(const Options& options) const {
    std::ofstream file(path_);
    file << fmt::format(
        "[pipeline]\nname = \"step\"\nmodel = \"{}\"\n\n[tokenizer]\n\n[sampler]\n\n[experts]\n"
        "cache_bytes = \"{}\"\nthreads = {}\n\n[trunk]\nthreads = {}\nweights_bytes = \"{}\"\n\n"
        "[gateway]\n",
        fs::absolute(options.model).string(), options.expert_cache, options.threads,
        options.threads, options.trunk_weights);
    file.close();
    if (!file) fail(fmt::format("cannot write {}", path_.string()));
}

/// What this machine can do, with the threads of a service.
struct Limits {
    double read_bytes_per_s = 0;
    double flops_per_s = 0;

    static Limits measure(int n_threads) {
        return {bench::read_bandwidth(n_threads),
                bench::fma_peak(n_threads, kernels::kernels().isa)};
    }
};

/// Decode against the bytes a token reads, prefill against the arithmetic of its rows.
void report_shares(const std::vector<Phase>& phases, const model::TokenCost& cost,
                   const Limits& before, const Limits& after, nlohmann::json& json) {
    const double read = (before.read_bytes_per_s + after.read_bytes_per_s) / 2;
    const double flops = (before.flops_per_s + after.flops_per_s) / 2;
    const double bytes_per_s = static_cast<double>(cost.trunk_bytes + cost.expert_bytes) *
                               static_cast<double>(phases[0].n_tokens) / phases[0].wall_s;
    const double done = static_cast<double>(cost.row_flops * phases[1].n_tokens + cost.head_flops);
    const double flops_per_s = done / phases[1].wall_s;
    fmt::print(
        "\nlimits before and after: reads {:.1f} and {:.1f} GB/s, {} multiply-adds {:.0f} and "
        "{:.0f} GFLOP/s\n",
        before.read_bytes_per_s / 1e9, after.read_bytes_per_s / 1e9, kernels::kernels().isa,
        before.flops_per_s / 1e9, after.flops_per_s / 1e9);
    fmt::print("decode reads {:.1f} GB/s, {:.2f} of the bandwidth\n", bytes_per_s / 1e9,
               bytes_per_s / read);
    fmt::print("prefill computes {:.0f} GFLOP/s, {:.2f} of the multiply-adds\n", flops_per_s / 1e9,
               flops_per_s / flops);
    json["limits"] = {{"read_bytes_per_s", {before.read_bytes_per_s, after.read_bytes_per_s}},
                      {"fma_flops_per_s", {before.flops_per_s, after.flops_per_s}}};
    json["decode_of_read_bandwidth"] = bytes_per_s / read;
    json["prefill_of_fma_peak"] = flops_per_s / flops;
}

/// The same phases by function calls in this process.
void compare_with_one_process(const Options& options, const fs::path& model, int n_threads,
                              const std::vector<Phase>& phases, nlohmann::json& json) {
    const std::uint64_t cache = value_or_fail(parse_bytes(options.expert_cache));
    auto calls = value_or_fail(bench::OneProcess::create(model, cache, n_threads, 256));
    // Touches memory, fills the expert cache.
    value_or_fail(calls->generate(options.prompt, options.tokens));
    const double decode_s = value_or_fail(calls->generate(1, options.tokens));
    const double prefill_s = value_or_fail(calls->generate(options.prompt, 1));
    fmt::print("\none process: decode {:.2f} ms a token, the pipeline takes {:.3f} of that\n",
               1e3 * decode_s / options.tokens, phases[0].wall_s / decode_s);
    fmt::print("one process: prefill {:.2f} ms a token, the pipeline takes {:.3f} of that\n",
               1e3 * prefill_s / options.prompt, phases[1].wall_s / prefill_s);
    json["one_process"] = {{"decode_s", decode_s}, {"prefill_s", prefill_s}};
}

int run(const Options& options, const fs::path& program) {
    std::optional<PipelineFile> written;
    if (options.config.empty()) written.emplace(options);
    const fs::path& config = written ? written->path() : options.config;
    const fs::path model = value_or_fail(launcher::load_pipeline(config)).model;
    const model::TokenCost cost = model::token_cost(value_or_fail(model::load_config(model)));
    const int n_threads =
        options.threads > 0 ? options.threads : static_cast<int>(machine_cores().allowed.size());
    nlohmann::json json;
    std::vector<Phase> phases;
    {
        std::unique_ptr<bench::MemoryCap> cap;
        std::uint64_t cap_bytes = 0;
        if (!options.cap.empty()) {
            cap_bytes = value_or_fail(parse_bytes(options.cap));
            cap = value_or_fail(bench::MemoryCap::create(cap_bytes));
        }
        RunningPipeline pipeline(program, config, fmt::format("step-{}", ::getpid()), cap.get());
        const launcher::RunRecord record = pipeline.wait_ready(options.start_s);
        auto client = value_or_fail(launcher::GatewayClient::connect(
            record.gateway, std::stoull(record.run_id, nullptr, 16), nullptr,
            Deadline::after_ms(kAskMs), [] { return false; }));
        // Wakes threads, fills the expert cache.
        generate(client, options.prompt, std::max(options.tokens, 4U));
        fmt::print("{}; {} threads\n", bench::cpu_model(), n_threads);
        json["cpu"] = bench::cpu_model();
        json["threads"] = n_threads;
        const Limits before = Limits::measure(n_threads);
        const Counts counts = read_counters(record);
        const storage::ReadShape shape = bench::read_shape(counts);
        bench::DeviceRate device(model, shape);
        bench::Streamed streamed;
        if (shape.n_threads > 0)
            streamed.device_bytes_per_s.push_back(value_or_fail(device.measure()));
        // A prompt of one token is one step like those that follow.
        phases.push_back(measure("decode", record, client, 1, options.tokens));
        if (shape.n_threads > 0)
            streamed.device_bytes_per_s.push_back(value_or_fail(device.measure()));
        phases.push_back(measure("prefill", record, client, options.prompt, 1));
        for (const Phase& phase : phases) json["phases"].push_back(report(phase));
        if (shape.n_threads > 0) {
            streamed.spent = phases[0].spent;
            streamed.shape = shape;
            streamed.wall_s = phases[0].wall_s;
            streamed.n_tokens = phases[0].n_tokens;
            streamed.peak_bytes = bench::peak_memory(record);
            streamed.token_bytes = counts.at("trunk.trunk_streamed_token_bytes");
            json["streaming"] = bench::report(streamed);
        }
        if (cap != nullptr) {
            const std::uint64_t peak = cap->peak_bytes();
            fmt::print("\nlimit of memory {}: peak {} with page cache, {} processes killed\n",
                       format_bytes(cap_bytes), format_bytes(peak), cap->n_killed());
            json["cap"] = {{"limit_bytes", cap_bytes},
                           {"peak_bytes", peak},
                           {"processes_killed", cap->n_killed()}};
        }
        report_shares(phases, cost, before, Limits::measure(n_threads), json);
        if (options.neighbour_pairs > 0)
            json["neighbour"] = report(measure_neighbour(client, options), options.tokens);
    }
    if (options.one_process) compare_with_one_process(options, model, n_threads, phases, json);
    if (options.json_file.empty()) return 0;
    std::ofstream file(options.json_file);
    file << json.dump(2) << "\n";
    file.flush();
    if (!file) fail(fmt::format("cannot write {}", options.json_file.string()));
    return 0;
}

}  // namespace

int main(int argc, char** argv) {
    CLI::App app{"Time of a step through the real pipeline, and who spends it."};
    Options options;
    auto* source = app.add_option_group("Pipeline", "one of these is needed");
    source->add_option("-c,--config", options.config, "pipeline file")->check(CLI::ExistingFile);
    source->add_option("--model", options.model, "checkpoint; the other settings are the defaults")
        ->check(CLI::ExistingDirectory);
    source->require_option(1);
    app.add_option("--expert-cache", options.expert_cache, "with --model")->capture_default_str();
    app.add_option("--trunk-weights", options.trunk_weights,
                   "memory for the trunk's weights, with --model; 0: all of them")
        ->capture_default_str();
    app.add_option("--cap", options.cap,
                   "limit of memory around the pipeline: it is ended if it takes more (as root)");
    app.add_option("--tokens", options.tokens, "to decode")
        ->check(CLI::PositiveNumber)
        ->capture_default_str();
    app.add_option("--prompt", options.prompt, "tokens to prefill")
        ->check(CLI::PositiveNumber)
        ->capture_default_str();
    app.add_option("--threads", options.threads, "of trunk and experts, with --model; 0: all cores")
        ->check(CLI::NonNegativeNumber);
    app.add_flag("--one-process", options.one_process,
                 "also compare with trunk and experts in one process");
    app.add_option("--start-s", options.start_s, "longest wait for the pipeline")
        ->check(CLI::PositiveNumber)
        ->capture_default_str();
    app.add_option("--neighbour", options.neighbour_pairs,
                   "so many pairs of decodes, with and without a niced busy process beside them");
    app.add_option("--json", options.json_file, "also write the results to this file");
    try {
        app.parse(argc, argv);
    } catch (const CLI::ParseError& error) {
        return app.exit(error) == 0 ? 0 : 2;
    }
    const fs::path here = fs::read_symlink("/proc/self/exe").parent_path();
    try {
        return run(options, here.parent_path() / "launcher" / "k3pipe");
    } catch (const Failure& failure) {
        fmt::print(stderr, "step: {}\n", failure.sentence);
        return 1;
    }
}
