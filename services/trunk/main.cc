// k3-trunk: a range of layers of the trunk, and the only caller of expert servers.

#include <algorithm>
#include <atomic>
#include <csignal>
#include <cstdio>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "common/base/cores.h"
#include "common/base/log.h"
#include "common/base/memory.h"
#include "common/base/settings.h"
#include "common/base/wake_latency.h"
#include "common/kernels/idle_threads.h"
#include "common/kernels/isa.h"
#include "common/kernels/parallel.h"
#include "common/model/load.h"
#include "common/model/memory_plan.h"
#include "common/pack/holdings.h"
#include "common/pack/packed_model.h"
#include "common/transport/service_options.h"
#include "services/trunk/expert_client.h"
#include "services/trunk/ram_weights.h"
#include "services/trunk/service.h"
#include "services/trunk/streamed_weights.h"

namespace k3::trunk {
namespace {

constexpr std::int64_t kIdleMs = 500;  // between looks at the expert servers

struct TrunkSettings {
    transport::ServiceOptions service;
    std::string model;
    std::vector<std::string> pack;
    std::string layers = "all";
    std::vector<std::string> experts;
    std::int64_t threads = 0;
    std::int64_t max_sessions = 64;
    std::int64_t max_step_rows = model::kDefaultMaxRows;
    std::int64_t expert_wait_ms = 30000;
    std::int64_t expert_call_ms = 600000;
    double hedge_quantile = 0;
    std::string fast_lane = "auto";
    std::int64_t spin_us = -1;
    std::string wake = "fast";
    std::uint64_t weights_bytes = 0;
    std::string direct_reads = "auto";
    std::uint64_t session_bytes = 0;
    std::string session_dir;
    std::uint64_t session_dir_bytes = 0;
    double mla_norm_eps = 1e-6;
    std::string mla_cache = "fp32";
};

Result<Settings::Action> read_settings(int argc, const char* const* argv, TrunkSettings& out) {
    Settings settings("k3-trunk", "Runs a range of layers of Kimi K3 for a k3pipe pipeline.");
    out.service.name = "trunk";
    transport::add_service_settings(settings, out.service);
    settings.add_text("model", &out.model, "directory of the checkpoint", true);
    settings.add_list("pack", &out.pack,
                      "file that k3pipe pack trunk made, once for each part: read from it instead "
                      "of the checkpoint, of which only config.json is needed then");
    settings.add_text("layers", &out.layers, "layers of this stage: all, or first-last");
    settings.add_list("experts", &out.experts, "endpoint of an expert server, once for each");
    settings.add_integer("threads", &out.threads, 0, 1024,
                         "compute threads; 0: one for each of its cores");
    settings.add_integer("max_sessions", &out.max_sessions, 1, 1 << 20, "sessions open at once");
    settings.add_integer("max_step_rows", &out.max_step_rows, 1,
                         static_cast<std::int64_t>(msg::kMaxStepRows),
                         "rows of one step; scratch memory is taken for so many");
    settings.add_integer("expert_wait_ms", &out.expert_wait_ms, 0, std::int64_t{1} << 40,
                         "how long a step waits for an expert server that is gone");
    settings.add_integer("expert_call_ms", &out.expert_call_ms, 1, std::int64_t{1} << 40,
                         "how long one call may take a server that shows signs of life");
    settings.add_number("hedge_quantile", &out.hedge_quantile, 0, 0.9999,
                        "a call that takes an expert server longer than this share of its calls "
                        "goes to a replica as well, the first answer counts; 0: never");
    settings.add_choice("fast_lane", &out.fast_lane, {"auto", "off"},
                        "expert calls through shared memory where the server is on this box; off: "
                        "all through ZeroMQ");
    settings.add_choice("wake", &out.wake, {"fast", "system"},
                        "fast: keep idle cores of this box from deep sleep while there is work, "
                        "where this user may do that (/dev/cpu_dma_latency)");
    settings.add_integer("spin_us", &out.spin_us, -1, 10'000,
                         "in a fast lane: how long to spin before sleeping; -1: 50 if this box has "
                         "a core for every compute thread of trunk and expert servers, else 0");
    settings.add_bytes("weights_bytes", &out.weights_bytes,
                       "memory for the weights of this stage; what does not fit is read again for "
                       "each step; 0: all of them");
    settings.add_choice("direct_reads", &out.direct_reads, {"auto", "off"},
                        "weights that are streamed or packed: read past the page cache where the "
                        "file system can; off: through it");
    settings.add_bytes("session_bytes", &out.session_bytes,
                       "memory for all sessions; 0: a quarter of what is free after loading");
    settings.add_text("session_dir", &out.session_dir,
                      "directory of saved sessions; empty: none can be saved or loaded");
    settings.add_bytes("session_dir_bytes", &out.session_dir_bytes,
                       "limit of all sessions in it: those that were not used for the longest time "
                       "are removed; 0: none");
    settings.add_number("mla_norm_eps", &out.mla_norm_eps, 1e-12, 1e-2,
                        "epsilon of the two low-rank norms of MLA, which config.json leaves open");
    settings.add_choice("mla_cache", &out.mla_cache, {"fp32", "bf16"},
                        "how the latents of MLA are kept; bf16 takes half the memory, and the "
                        "output is another one");
    return settings.parse(argc, argv);
}

/// MoE layers of a range, as the expert directory wants them.
ExpertDirectory::Needs expert_needs(const model::Model& model, LayerRange range,
                                    const std::string& self) {
    const std::uint32_t first = std::max(range.first, model.config.first_k_dense);
    return {self,
            model.fingerprint,
            first,
            first < range.end() ? range.end() - first : 0,
            model.config.moe.n_experts,
            model.config.moe.latent_size};
}

storage::DirectFile::Mode reads_of(const TrunkSettings& settings) {
    using Mode = storage::DirectFile::Mode;
    return settings.direct_reads == "off" ? Mode::buffered : Mode::direct_if_possible;
}

/// Everything the loop needs, in the order of dependence.
struct Parts {
    model::Model model;
    std::optional<pack::TrunkPacks> packs;  // none: the weights are the checkpoint's
    telemetry::Counters counters;
    std::unique_ptr<ExpertClient> experts;
    std::unique_ptr<WeightSource> weights;
    std::unique_ptr<SessionTable> sessions;
    std::unique_ptr<SessionDirectory> saved;
    std::unique_ptr<Stage> stage;
    std::unique_ptr<transport::Arena> arena;
    std::unique_ptr<Service> service;
};

Result<std::unique_ptr<WeightSource>> load_weights(
    Parts& parts, LayerRange range, const std::optional<StreamedWeights::Options>& streamed,
    storage::DirectFile::Mode reads, const LoadProgress& progress) {
    const model::ModelConfig& config = parts.model.config;
    if (!streamed.has_value()) {
        ASSIGN_OR_RETURN(std::unique_ptr<WeightSource> weights,
                         parts.packs.has_value()
                             ? RamWeights::load(*parts.packs, config, range, progress)
                             : RamWeights::load(*parts.model.checkpoint, config, range, progress));
        if (parts.packs.has_value() && !parts.packs->why_buffered().empty())
            log::info("the pack was read through the page cache: " + parts.packs->why_buffered());
        return weights;
    }
    ASSIGN_OR_RETURN(std::unique_ptr<WeightFiles> files,
                     parts.packs.has_value()
                         ? PackFiles::open(*parts.packs, config, range)
                         : CheckpointFiles::open(*parts.model.checkpoint, config, range, reads));
    ASSIGN_OR_RETURN(auto weights, StreamedWeights::load(std::move(files), config, range, *streamed,
                                                         parts.counters, progress));
    if (const std::string why = weights->why_buffered(); !why.empty())
        log::warn("weights are read through the page cache: " + why);
    const storage::ReadShape& shape = weights->read_shape();
    log::info("streaming weights token_bytes=" + format_bytes(streamed->plan.token_bytes(config)) +
              " ring=" + format_bytes(streamed->plan.ring_bytes) + " request=" +
              format_bytes(shape.request_bytes) + " threads=" + std::to_string(shape.n_threads));
    return std::unique_ptr<WeightSource>(std::move(weights));
}

/// Meets the expert servers on a second thread while the weights load: a wrong checkpoint over
/// there should not be found only after minutes of reading here.
Status load_and_connect(Parts& parts, LayerRange range,
                        const std::optional<StreamedWeights::Options>& streamed,
                        storage::DirectFile::Mode reads, transport::Server& server,
                        std::atomic<bool>& gave_up) {
    Status connected;
    std::atomic<bool> is_connecting{true};
    std::thread meeting([&] {
        connected = parts.experts->connect();
        if (!connected.has_value()) gave_up = true;
        is_connecting = false;
    });
    auto progress = [&](std::uint64_t done, std::uint64_t total, const std::string& what) {
        server.set_progress(static_cast<std::uint32_t>(static_cast<double>(done) * 1000.0 /
                                                       static_cast<double>(total)),
                            what);
        return !gave_up && !server.stopping();
    };
    auto weights = load_weights(parts, range, streamed, reads, progress);
    if (!weights.has_value())
        gave_up = true;
    else if (is_connecting)
        server.set_progress(999, "waiting for expert servers");
    meeting.join();
    // The thread that failed first has the reason; the other one was only told to stop.
    if (!connected.has_value() && connected.error().code != ErrorCode::cancelled) return connected;
    if (!weights.has_value()) return std::move(weights).error();
    RETURN_IF_ERROR(std::move(connected));
    parts.weights = std::move(weights).value();
    return Status::ok();
}

/// Outputs of a few steps; too little shared memory costs speed, not the service.
std::unique_ptr<transport::Arena> make_arena(const TrunkSettings& settings, const Stage& stage) {
    if (settings.service.payload != "shm") return nullptr;
    const model::ArenaSize size =
        model::trunk_reply_arena(stage.config(), stage.range(), stage.max_step_rows());
    auto arena = transport::Arena::create(
        {transport::segment_name(settings.service.run(), settings.service.name), size.slot_bytes,
         size.n_slots});
    if (arena.has_value()) return std::move(arena).value();
    log::warn("replies go inline: " + arena.error().sentence());
    return nullptr;
}

/// How to stream the weights; nothing if all of them stay in memory.
Result<std::optional<StreamedWeights::Options>> plan_streaming(const TrunkSettings& settings,
                                                               const model::ModelConfig& config,
                                                               LayerRange range, bool is_packed,
                                                               transport::Server& server) {
    std::optional<StreamedWeights::Options> streamed;
    if (settings.weights_bytes == 0) return streamed;
    model::WeightPlanOptions options;
    options.first_layer = range.first;
    options.n_layers = range.count;
    options.budget_bytes = settings.weights_bytes;
    if (is_packed) options.units = pack::read_units(config, range);
    ASSIGN_OR_RETURN(model::WeightPlan plan, model::plan_weights(config, options));
    if (plan.keeps_all()) return streamed;
    streamed.emplace();
    streamed->plan = std::move(plan);
    streamed->stopping = [&server] { return server.stopping(); };
    return streamed;
}

/// A stage that is too large for this machine is refused before anything is read.
Status check_memory(const TrunkSettings& settings, const model::ModelConfig& config,
                    LayerRange range, std::uint64_t weights_bytes) {
    const std::uint64_t need =
        weights_bytes + model::step_buffer_bytes(config, range,
                                                 static_cast<std::uint64_t>(settings.max_step_rows),
                                                 static_cast<std::uint64_t>(kernels::threads()));
    ASSIGN_OR_RETURN(const AvailableMemory available, available_memory());
    if (need <= available.bytes) return Status::ok();
    return Error{
        ErrorCode::resource_exhausted,
        "layers " + std::to_string(range.first) + "-" + std::to_string(range.end() - 1) + " of " +
            config.name + " need " + format_bytes(need) + " of memory, but " +
            format_bytes(available.bytes) + " are left (" + available.limited_by + ")",
        "give it less with --weights-bytes, or fewer layers with --layers and the others to "
        "further stages"};
}

Result<std::uint64_t> session_budget(const TrunkSettings& settings) {
    ASSIGN_OR_RETURN(const AvailableMemory available, available_memory());
    if (settings.session_bytes == 0) return available.bytes / 4;
    if (settings.session_bytes <= available.bytes) return settings.session_bytes;
    return Error{ErrorCode::resource_exhausted,
                 "sessions were granted " + format_bytes(settings.session_bytes) + ", but " +
                     format_bytes(available.bytes) + " are left (" + available.limited_by + ")",
                 "lower --session-bytes, or give this stage fewer layers"};
}

Status open_weights(const TrunkSettings& settings, Parts& parts) {
    if (settings.pack.empty()) {
        ASSIGN_OR_RETURN(parts.model, model::open_model(settings.model));
        return Status::ok();
    }
    const std::vector<std::filesystem::path> files(settings.pack.begin(), settings.pack.end());
    ASSIGN_OR_RETURN(parts.packs, pack::TrunkPacks::open(files, reads_of(settings)));
    ASSIGN_OR_RETURN(parts.model, pack::open_packed_model(settings.model, parts.packs->part(0)));
    return Status::ok();
}

/// What can be wrong with them before the model is looked at.
Status check_settings(const TrunkSettings& settings) {
    RETURN_IF_ERROR(kernels::check_isa());
    return SessionDirectory::check_place(settings.session_dir);
}

Status build(const TrunkSettings& settings, transport::Server& server, Parts& parts) {
    RETURN_IF_ERROR(check_settings(settings));
    kernels::set_threads(static_cast<int>(settings.threads));
    RETURN_IF_ERROR(open_weights(settings, parts));
    parts.model.config.mla.lora_norm_eps = static_cast<float>(settings.mla_norm_eps);
    parts.model.config.mla.cache =
        settings.mla_cache == "bf16" ? model::MlaCache::bf16 : model::MlaCache::f32;
    const model::ModelConfig& config = parts.model.config;
    ASSIGN_OR_RETURN(const LayerRange range, parse_layers(settings.layers, config));

    const bool is_packed = parts.packs.has_value();
    ASSIGN_OR_RETURN(const auto streamed,
                     plan_streaming(settings, config, range, is_packed, server));
    if (is_packed) RETURN_IF_ERROR(pack::check_runs(*parts.packs, config, range));
    RETURN_IF_ERROR(check_memory(settings, config, range,
                                 streamed.has_value()
                                     ? streamed->plan.memory_bytes()
                                     : model::resident_weight_bytes(config, range)));

    std::atomic<bool> gave_up{false};
    ExpertClient::Options client;
    client.needs = expert_needs(parts.model, range, settings.service.name);
    client.endpoints = settings.experts;
    client.run_id = settings.service.run();
    client.keys = settings.service.curve_keys;
    client.top_k = config.moe.top_k;
    client.max_rows = static_cast<std::size_t>(settings.max_step_rows);
    client.wait_ms = settings.expert_wait_ms;
    client.call_ms = settings.expert_call_ms;
    client.hedge_quantile = settings.hedge_quantile;
    client.on_waiting = [&server](const std::string& servers) { server.set_waiting_for(servers); };
    client.use_shm = settings.service.payload == "shm";
    client.fast_lane = settings.fast_lane == "auto";
    client.spin_us = settings.spin_us;
    client.cores = {machine_cores().allowed, static_cast<std::size_t>(kernels::threads())};
    client.stopping = [&server, &gave_up] { return gave_up || server.stopping(); };
    ASSIGN_OR_RETURN(parts.experts, ExpertClient::create(std::move(client), parts.counters));
    RETURN_IF_ERROR(load_and_connect(parts, range, streamed, reads_of(settings), server, gave_up));
    parts.experts->set_stopping([&server] { return server.stopping(); });

    ASSIGN_OR_RETURN(parts.stage,
                     Stage::create(config, *parts.weights, *parts.experts, kernels::kernels(),
                                   {range, static_cast<std::size_t>(settings.max_step_rows),
                                    kernels::threads()}));
    ASSIGN_OR_RETURN(const std::uint64_t budget, session_budget(settings));
    parts.sessions = std::make_unique<SessionTable>(
        config, range, kernels::threads(),
        SessionTable::Options{static_cast<std::uint32_t>(settings.max_sessions), budget,
                              config.max_positions});
    parts.saved = std::make_unique<SessionDirectory>(
        SessionDirectory::Options{settings.session_dir, settings.session_dir_bytes},
        SessionOrigin{parts.model.fingerprint, range, config.n_layers, config.mla.lora_norm_eps,
                      config.mla.cache},
        parts.sessions->layout(), config.max_positions);
    parts.arena = make_arena(settings, *parts.stage);
    parts.service = std::make_unique<Service>(
        *parts.stage, *parts.sessions, *parts.saved, *parts.experts, parts.arena.get(),
        static_cast<std::uint32_t>(settings.max_sessions), parts.counters);
    log::info("loaded " + config.name + " layers " + std::to_string(range.first) + "-" +
              std::to_string(range.end() - 1) + " weights=" + format_bytes(parts.weights->bytes()) +
              " sessions=" + format_bytes(budget) +
              " threads=" + std::to_string(kernels::threads()) + " isa=" + kernels::kernels().isa);
    return Status::ok();
}

int run(const TrunkSettings& settings) {
    transport::install_stop_signals();
    // A file that may not grow further is a save that fails, not the end of this process.
    std::signal(SIGXFSZ, SIG_IGN);
    transport::Server::Options options = settings.service.server(msg::ServiceKind::trunk);
    options.max_message_bytes = transport::max_frame_bytes(settings.max_step_rows);
    auto created = transport::Server::create(options);
    if (!created.has_value()) return transport::fail(created.error(), nullptr);
    transport::Server& server = **created;

    Parts parts;
    Status built = build(settings, server, parts);
    if (!built.has_value()) {
        if (server.stopping()) return kExitOk;
        return transport::fail(built.error(), &server);
    }
    server.set_statistics([&parts] {
        parts.weights->publish_counters();
        return parts.counters.snapshot();
    });
    msg::Announcement announcement = options.announcement;
    announcement.fingerprint = parts.model.fingerprint;
    announcement.facts = parts.service->facts();
    if (parts.arena) announcement.arena = parts.arena->probe();
    server.set_ready(std::move(announcement));
    log::info("ready listen=" + server.endpoint());

    WakeLatency wake;
    while (!server.stopping()) {
        auto request = server.next(Deadline::after_ms(kIdleMs));
        if (!request.has_value()) {
            wake.idle();
            parts.experts->look_after_servers();
            parts.service->tend();
            continue;
        }
        if (settings.wake == "fast") wake.busy();
        parts.service->handle(std::move(*request));
    }
    server.set_statistics({});
    log::info("stopped");
    return kExitOk;
}

}  // namespace
}  // namespace k3::trunk

int main(int argc, char** argv) {
    k3::kernels::let_idle_threads_sleep(argv);
    k3::trunk::TrunkSettings settings;
    auto action = k3::trunk::read_settings(argc, argv, settings);
    if (!action.has_value()) {
        std::fprintf(stderr, "%s\n", action.error().sentence().c_str());
        return k3::exit_code(action.error().code);
    }
    if (*action == k3::Settings::Action::exit) return k3::kExitOk;
    if (auto begun = k3::transport::begin_service(settings.service); !begun.has_value())
        return k3::transport::fail(begun.error(), nullptr);
    if (settings.service.check) {
        const k3::Status checked = k3::trunk::check_settings(settings);
        return checked.has_value() ? k3::kExitOk : k3::transport::fail(checked.error(), nullptr);
    }
    return k3::trunk::run(settings);
}
