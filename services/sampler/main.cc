// k3-sampler: a token from logits.

#include <cstdio>

#include "common/base/log.h"
#include "common/base/settings.h"
#include "common/transport/service_options.h"
#include "services/sampler/service.h"

namespace {

k3::Result<k3::Settings::Action> read_settings(int argc, const char* const* argv,
                                               k3::transport::ServiceOptions& options,
                                               std::int64_t& max_rows) {
    k3::Settings settings("k3-sampler", "Draws tokens from logits for a k3pipe pipeline.");
    k3::transport::add_service_settings(settings, options);
    settings.add_integer("max_rows", &max_rows, 1, 65536, "rows of one call, more are refused");
    return settings.parse(argc, argv);
}

}  // namespace

// NOLINTNEXTLINE(bugprone-exception-escape): running out of memory is meant to end it
int main(int argc, char** argv) {
    k3::transport::ServiceOptions options;
    options.name = "sampler";
    std::int64_t max_rows = 4096;
    auto action = read_settings(argc, argv, options, max_rows);
    if (!action.has_value()) {
        std::fprintf(stderr, "%s\n", action.error().sentence().c_str());
        return k3::exit_code(action.error().code);
    }
    if (*action == k3::Settings::Action::exit) return k3::kExitOk;

    if (auto begun = k3::transport::begin_service(options); !begun.has_value())
        return k3::transport::fail(begun.error(), nullptr);
    if (options.check) return k3::kExitOk;
    k3::sampler::Service service(static_cast<std::uint32_t>(max_rows));
    k3::transport::install_stop_signals();
    auto server_options = options.server(k3::msg::ServiceKind::sampler);
    server_options.max_message_bytes = k3::transport::max_frame_bytes(max_rows);
    k3::msg::Announcement announcement = server_options.announcement;
    auto server = k3::transport::Server::create(std::move(server_options));
    if (!server.has_value()) return k3::transport::fail(server.error(), nullptr);
    (*server)->set_statistics([&service] { return service.counters().snapshot(); });
    announcement.facts = k3::msg::SamplerFacts{static_cast<std::uint32_t>(max_rows)};
    (*server)->set_ready(std::move(announcement));
    k3::log::info("ready listen=" + options.listen);

    while (!(*server)->stopping()) {
        auto request = (*server)->next(k3::Deadline::after_ms(1000));
        if (request.has_value()) service.handle(std::move(*request));
    }
    k3::log::info("stopped");
    return k3::kExitOk;
}
