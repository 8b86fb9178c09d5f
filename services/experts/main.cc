// k3-experts: a share of the routed experts.

#include <cstdio>
#include <memory>
#include <utility>

#include "common/base/cores.h"
#include "common/base/log.h"
#include "common/base/settings.h"
#include "common/base/wake_latency.h"
#include "common/kernels/idle_threads.h"
#include "common/kernels/isa.h"
#include "common/kernels/kernel_table.h"
#include "common/kernels/parallel.h"
#include "common/pack/packed_model.h"
#include "common/transport/lane_host.h"
#include "common/transport/service_options.h"
#include "services/experts/service.h"

namespace {

struct ExpertsSettings {
    k3::transport::ServiceOptions service;
    k3::experts::Service::Options experts;
    std::string model;
    std::string pack;
    std::int64_t threads = 0;
    std::int64_t spin_us = -1;
    std::string wake = "fast";
    std::string direct = "auto";
};

k3::Result<k3::Settings::Action> read_settings(int argc, const char* const* argv,
                                               ExpertsSettings& out) {
    std::int64_t max_call_rows = out.experts.max_call_rows;
    std::int64_t n_readers = out.experts.n_readers;
    std::int64_t weight = out.experts.weight;
    k3::Settings settings("k3-experts", "Serves routed experts of a Kimi K3 checkpoint.");
    k3::transport::add_service_settings(settings, out.service);
    settings.add_text("model", &out.model, "directory of the checkpoint", true);
    settings.add_text("pack", &out.pack,
                      "file that k3pipe pack experts made: read from it instead of the checkpoint, "
                      "of which only config.json is needed then");
    settings.add_text("share", &out.experts.share,
                      "experts served: all, 0/3 (every third), \"layers 1-4 experts 0-7; ...\", "
                      "@FILE#NAME (of server NAME in a placement file)");
    settings.add_bytes("cache_bytes", &out.experts.cache_bytes,
                       "memory for experts; 0: all of the share, or a quarter of the free memory");
    settings.add_choice("policy", &out.experts.policy, {"rank-weighted", "lru"},
                        "which experts stay in memory");
    settings.add_integer("threads", &out.threads, 0, 1024,
                         "threads that compute; 0: one for each of its cores");
    settings.add_choice("wake", &out.wake, {"fast", "system"},
                        "fast: keep idle cores of this box from deep sleep while there is work, "
                        "where this user may do that (/dev/cpu_dma_latency)");
    settings.add_integer("spin_us", &out.spin_us, -1, 10'000,
                         "in a fast lane: how long to spin for the next call before sleeping; "
                         "-1: as long as the trunk says");
    settings.add_integer("read_threads", &n_readers, 1, 64, "expert reads going on at a time");
    settings.add_choice("direct", &out.direct, {"auto", "off"},
                        "auto: experts are read past the page cache where that is possible");
    settings.add_text(
        "disk_cache", &out.experts.disk_cache,
        "directory on a local disk that keeps experts of a slow checkpoint directory");
    settings.add_bytes("disk_cache_bytes", &out.experts.disk_cache_bytes,
                       "what the disk cache may take there");
    settings.add_text("warm_file", &out.experts.warm_file,
                      "file that carries what memory holds over a restart; \"warm\" in the disk "
                      "cache unless given");
    settings.add_text("trace", &out.experts.trace,
                      "CSV file to record which experts the calls use, for bench cache");
    settings.add_bytes("trace_bytes", &out.experts.trace_bytes, "the recording ends there");
    settings.add_integer("read_wait_ms", &out.experts.read_wait_ms, 1, 3'600'000,
                         "how long one call may wait for its experts to be read");
    settings.add_integer("max_call_rows", &max_call_rows, 1, 65536,
                         "rows of one call, more are refused");
    settings.add_integer("weight", &weight, 0, k3::msg::kMaxExpertWeight,
                         "among servers that hold the same expert: one of weight 2 is given twice "
                         "as many; 0: as a placement file says, else 1");
    settings.add_bytes("read_limit", &out.experts.read_limit,
                       "read no more bytes per second than this, to try out a slower disk; 0: no "
                       "limit");
    auto action = settings.parse(argc, argv);
    out.experts.max_call_rows = static_cast<std::uint32_t>(max_call_rows);
    out.experts.n_readers = static_cast<std::uint32_t>(n_readers);
    out.experts.weight = static_cast<std::uint32_t>(weight);
    out.experts.direct = out.direct == "auto";
    out.experts.name = out.service.name;
    out.experts.use_shm = out.service.payload == "shm";
    out.experts.run_id = out.service.run();
    return action;
}

struct Weights {
    k3::model::Model model;
    std::shared_ptr<const k3::pack::Pack> pack;  // null: the checkpoint's
};

k3::Result<Weights> open_weights(const ExpertsSettings& settings) {
    using Mode = k3::pack::Pack::Mode;
    Weights weights;
    if (settings.pack.empty()) {
        ASSIGN_OR_RETURN(weights.model, k3::model::open_model(settings.model));
        return weights;
    }
    ASSIGN_OR_RETURN(
        weights.pack,
        k3::pack::Pack::open(settings.pack, k3::pack::Kind::experts,
                             settings.experts.direct ? Mode::direct_if_possible : Mode::buffered));
    ASSIGN_OR_RETURN(weights.model, k3::pack::open_packed_model(settings.model, *weights.pack));
    return weights;
}

/// For trunks on this box. Without them everything goes through ZeroMQ.
std::shared_ptr<k3::transport::LaneHost> make_lanes(const ExpertsSettings& settings) {
    if (settings.service.payload != "shm") return nullptr;
    k3::transport::LaneHost::Options options;
    options.cores = {k3::machine_cores().allowed, static_cast<std::size_t>(k3::kernels::threads())};
    options.spin_us = settings.spin_us;
    auto lanes = k3::transport::LaneHost::create(options);
    if (lanes.has_value()) return std::move(lanes).value();
    k3::log::warn("no fast lanes: " + lanes.error().sentence());
    return nullptr;
}

}  // namespace

int main(int argc, char** argv) {
    k3::kernels::let_idle_threads_sleep(argv);
    ExpertsSettings settings;
    settings.service.name = "experts";
    const auto action = read_settings(argc, argv, settings);
    if (!action.has_value()) {
        std::fprintf(stderr, "%s\n", action.error().sentence().c_str());
        return k3::exit_code(action.error().code);
    }
    if (*action == k3::Settings::Action::exit) return k3::kExitOk;

    if (auto begun = k3::transport::begin_service(settings.service); !begun.has_value())
        return k3::transport::fail(begun.error(), nullptr);
    if (settings.service.check) {
        const k3::Status isa = k3::kernels::check_isa();
        return isa.has_value() ? k3::kExitOk : k3::transport::fail(isa.error(), nullptr);
    }
    k3::kernels::set_threads(static_cast<int>(settings.threads));
    k3::transport::install_stop_signals();
    auto options = settings.service.server(k3::msg::ServiceKind::experts);
    options.max_message_bytes = k3::transport::max_frame_bytes(settings.experts.max_call_rows);
    options.lanes = make_lanes(settings);
    auto server = k3::transport::Server::create(std::move(options));
    if (!server.has_value()) return k3::transport::fail(server.error(), nullptr);

    if (auto isa = k3::kernels::check_isa(); !isa.has_value())
        return k3::transport::fail(isa.error(), server->get());
    (*server)->set_progress(0, "opening " + settings.model);
    const auto weights = open_weights(settings);
    if (!weights.has_value()) return k3::transport::fail(weights.error(), server->get());
    (*server)->set_progress(500, "looking up the experts of share " + settings.experts.share);
    const auto service =
        k3::experts::Service::create(settings.experts, weights->model, weights->pack);
    if (!service.has_value()) return k3::transport::fail(service.error(), server->get());

    (*service)->report_to((*server)->work());
    (*server)->set_statistics([&experts = **service] { return experts.statistics(); });
    (*server)->set_ready((*service)->announcement());
    const k3::experts::ExpertCache::Slots slots = (*service)->cache().slots();
    k3::log::info("ready listen=" + settings.service.listen + " isa=" + k3::kernels::kernels().isa +
                  " experts=" + std::to_string((*service)->n_held()) +
                  " cache_slots=" + std::to_string(slots.n_slots) +
                  " threads=" + std::to_string(k3::kernels::threads()));
    k3::WakeLatency wake;
    while (!(*server)->stopping()) {
        auto request = (*server)->next(k3::Deadline::after_ms(1000));
        if (!request.has_value()) {
            wake.idle();
            continue;
        }
        if (settings.wake == "fast") wake.busy();
        (*service)->handle(std::move(*request));
    }
    k3::log::info("stopped");
    return k3::kExitOk;
}
