// k3-tokenizer: text and conversations to ids, ids to text.

#include <cstdio>

#include "common/base/log.h"
#include "common/base/settings.h"
#include "common/transport/service_options.h"
#include "services/tokenizer/service.h"

namespace {

k3::Result<k3::Settings::Action> read_settings(int argc, const char* const* argv,
                                               k3::transport::ServiceOptions& options,
                                               std::string& model) {
    k3::Settings settings("k3-tokenizer",
                          "Turns text and conversations into ids and back for a k3pipe pipeline.");
    k3::transport::add_service_settings(settings, options);
    settings.add_text("model", &model,
                      "directory with config.json, tiktoken.model and tokenizer_config.json", true);
    return settings.parse(argc, argv);
}

}  // namespace

int main(int argc, char** argv) {
    k3::transport::ServiceOptions options;
    options.name = "tokenizer";
    std::string model;
    auto action = read_settings(argc, argv, options, model);
    if (!action.has_value()) {
        std::fprintf(stderr, "%s\n", action.error().sentence().c_str());
        return k3::exit_code(action.error().code);
    }
    if (*action == k3::Settings::Action::exit) return k3::kExitOk;

    if (auto begun = k3::transport::begin_service(options); !begun.has_value())
        return k3::transport::fail(begun.error(), nullptr);
    if (options.check) return k3::kExitOk;
    k3::transport::install_stop_signals();
    auto server = k3::transport::Server::create(options.server(k3::msg::ServiceKind::tokenizer));
    if (!server.has_value()) return k3::transport::fail(server.error(), nullptr);
    (*server)->set_progress(0, "reading the vocabulary of " + model);
    auto service = k3::tokenizer::Service::create(model);
    if (!service.has_value()) return k3::transport::fail(service.error(), server->get());

    (*server)->set_statistics([&service] { return (*service)->counters().snapshot(); });
    k3::msg::Announcement announcement =
        options.server(k3::msg::ServiceKind::tokenizer).announcement;
    announcement.fingerprint = (*service)->fingerprint();
    announcement.facts = (*service)->facts();
    (*server)->set_ready(std::move(announcement));
    k3::log::info("ready listen=" + options.listen +
                  " vocab_size=" + std::to_string((*service)->facts().vocab_size));

    while (!(*server)->stopping()) {
        auto request = (*server)->next(k3::Deadline::after_ms(1000));
        if (request.has_value()) (*service)->handle(std::move(*request));
    }
    k3::log::info("stopped");
    return k3::kExitOk;
}
