// A service that does nothing but live as it is told to: for tests of the supervisor.
//
//   fake_service --listen ENDPOINT --name NAME --kind experts [BEHAVIOUR]...
//
// Behaviours: --load-ms N, --exit-at-start N, --fail-first N (exit 1 in the first N lives, counted
// in --lives FILE), --fingerprint TEXT, --deaf (ignores SIGTERM and its lifeline), --arena (owns a
// shared-memory segment), --last-words FILE (appends its name there when it ends well).

#include <signal.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <map>
#include <memory>
#include <string>

#include "common/base/log.h"
#include "common/transport/arena.h"
#include "common/transport/service_options.h"

namespace {

using namespace k3;

std::map<std::string, std::string> read_flags(int argc, char** argv) {
    std::map<std::string, std::string> flags;
    for (int i = 1; i < argc; ++i) {
        std::string flag = argv[i];
        bool has_value = i + 1 < argc && std::string(argv[i + 1]).rfind("--", 0) != 0;
        flags[flag.substr(2)] = has_value ? argv[++i] : "true";
    }
    return flags;
}

msg::ServiceKind kind_of(const std::string& word) {
    for (auto kind : {msg::ServiceKind::gateway, msg::ServiceKind::tokenizer,
                      msg::ServiceKind::trunk, msg::ServiceKind::experts})
        if (to_string(kind) == word) return kind;
    return msg::ServiceKind::sampler;
}

/// Counts this life in a file; how many there were before.
int lives_before(const std::string& file) {
    int lives = 0;
    std::ifstream(file) >> lives;
    std::ofstream(file) << lives + 1;
    return lives;
}

}  // namespace

int main(int argc, char** argv) {
    std::map<std::string, std::string> flags = read_flags(argc, argv);
    transport::ServiceOptions options;
    options.name = flags["name"];
    options.listen = flags["listen"];
    if (flags.contains("run-id")) options.run_id = flags["run-id"];
    if (auto begun = transport::begin_service(options); !begun.has_value())
        return transport::fail(begun.error(), nullptr);
    if (flags.contains("complain")) {
        std::fprintf(stderr, "fake_service: cannot be started like this\n");
        return 2;
    }
    if (flags.contains("exit-at-start")) {
        log::error("the shelf is empty; fill it");
        return std::atoi(flags["exit-at-start"].c_str());
    }
    if (flags.contains("fail-first") &&
        lives_before(flags["lives"]) < std::atoi(flags["fail-first"].c_str()))
        return 1;
    if (flags.contains("deaf")) {
        ::signal(SIGTERM, SIG_IGN);
    } else {
        transport::install_stop_signals();
        if (flags.contains("lifeline-fd"))
            options.lifeline_fd = std::atoi(flags["lifeline-fd"].c_str());
    }
    auto server = transport::Server::create(options.server(kind_of(flags["kind"])));
    if (!server.has_value()) return transport::fail(server.error(), nullptr);
    if (flags.contains("load-ms")) {
        int ms = std::atoi(flags["load-ms"].c_str());
        for (int i = 0; i < 10; ++i) {
            (*server)->set_progress(static_cast<std::uint32_t>(i * 100), "crates");
            ::usleep(static_cast<unsigned>(ms) * 100);
        }
    }
    std::unique_ptr<transport::Arena> arena;
    if (flags.contains("arena")) {
        auto made = transport::Arena::create(
            {transport::segment_name(options.run(), options.name), 4096, 1});
        if (!made.has_value()) return transport::fail(made.error(), server->get());
        arena = *std::move(made);
    }
    msg::Announcement announcement;
    announcement.fingerprint = flags["fingerprint"];
    if (announcement.kind == msg::ServiceKind::gateway) announcement.facts = msg::GatewayFacts{};
    (*server)->set_ready(announcement);
    log::info("ready");
    while (!(*server)->stopping()) (void)(*server)->next(Deadline::after_ms(1000));
    if (flags.contains("last-words"))
        std::ofstream(flags["last-words"], std::ios::app) << options.name << ' ';
    return 0;
}
