// k3-gateway: the only driver of the generation loop.

#include <cstdio>
#include <string>
#include <vector>

#include "common/base/log.h"
#include "common/base/settings.h"
#include "common/transport/service_options.h"
#include "services/gateway/service.h"

namespace {

struct GatewaySettings {
    k3::transport::ServiceOptions service;
    k3::gateway::Service::Options gateway;
};

k3::Result<k3::Settings::Action> read_settings(int argc, const char* const* argv,
                                               GatewaySettings& out) {
    std::int64_t max_requests = out.gateway.max_requests;
    std::int64_t max_queue = out.gateway.max_queue;
    std::int64_t prefill_chunk = out.gateway.prefill_chunk;
    k3::Settings settings("k3-gateway", "Drives the generation loop of a k3pipe pipeline.");
    k3::transport::add_service_settings(settings, out.service);
    settings.add_text("model_name", &out.gateway.model_name, "what clients call the model");
    settings.add_text("tokenizer", &out.gateway.stages.tokenizer, "endpoint of the tokenizer",
                      true);
    settings.add_list("trunk", &out.gateway.stages.trunk,
                      "endpoint of a trunk stage, repeated in the order of their layers", true);
    settings.add_text("sampler", &out.gateway.stages.sampler, "endpoint of the sampler", true);
    settings.add_integer("max_requests", &max_requests, 1, 4096,
                         "requests running at the same time");
    settings.add_integer("max_queue", &max_queue, 0, 65536,
                         "requests waiting for a place, more are refused");
    settings.add_integer("prefill_chunk", &prefill_chunk, 1, 65536, "rows of one prompt in a step");
    settings.add_integer("wait_ms", &out.gateway.wait_ms, 0, 3'600'000,
                         "how long a request waits for a stage that is missing");
    settings.add_integer("step_wait_ms", &out.gateway.pipeline.step_wait_ms, 1000, 86'400'000,
                         "longest time a trunk stage may take for one step");
    auto action = settings.parse(argc, argv);
    out.gateway.max_requests = static_cast<std::uint32_t>(max_requests);
    out.gateway.max_queue = static_cast<std::uint32_t>(max_queue);
    out.gateway.prefill_chunk = static_cast<std::uint32_t>(prefill_chunk);
    out.gateway.stages.run_id = out.service.run();
    out.gateway.stages.use_shm = out.service.payload == "shm";
    return action;
}

}  // namespace

// NOLINTNEXTLINE(bugprone-exception-escape): running out of memory is meant to end it
int main(int argc, char** argv) {
    GatewaySettings settings;
    settings.service.name = "gateway";
    const auto action = read_settings(argc, argv, settings);
    if (!action.has_value()) {
        std::fprintf(stderr, "%s\n", action.error().sentence().c_str());
        return k3::exit_code(action.error().code);
    }
    if (*action == k3::Settings::Action::exit) return k3::kExitOk;

    if (auto begun = k3::transport::begin_service(settings.service); !begun.has_value())
        return k3::transport::fail(begun.error(), nullptr);
    if (settings.service.check) return k3::kExitOk;
    settings.gateway.stages.keys = settings.service.curve_keys;
    k3::telemetry::Counters counters;
    k3::transport::install_stop_signals();
    auto server =
        k3::transport::Server::create(settings.service.server(k3::msg::ServiceKind::gateway));
    if (!server.has_value()) return k3::transport::fail(server.error(), nullptr);
    auto service = k3::gateway::Service::create(settings.gateway, **server, counters);
    if (!service.has_value()) return k3::transport::fail(service.error(), server->get());
    (*server)->set_statistics([&counters] { return counters.snapshot(); });

    const k3::Status connected = (*service)->connect();
    if (!connected.has_value()) return k3::transport::fail(connected.error(), server->get());
    if (!(*server)->stopping()) k3::log::info("ready listen=" + settings.service.listen);
    (*service)->run();
    k3::log::info("stopped");
    return k3::kExitOk;
}
