// A service in a process of its own, for the tests that kill, stop and orphan one.
//
// It has the settings of every service and an arena, so that a test can see what stays behind.

#include <unistd.h>

#include <cstdlib>
#include <memory>
#include <string>

#include "common/transport/arena.h"
#include "common/transport/service_options.h"

using namespace k3;
using namespace k3::transport;

namespace {

/// Computes for ever, as a service in the middle of a long step does: it hears of nothing. Looks at
/// the clock because the thread sanitizer runs signal handlers only inside calls that it knows.
[[noreturn]] void compute() {
    while (true) Clock::now();
}

void serve(Server& server, Arena& arena) {
    while (!server.stopping()) {
        std::optional<Request> request = server.next(Deadline::after_ms(1000));
        if (!request) continue;
        const auto* encode = std::get_if<msg::Encode>(&request->envelope.body);
        if (encode != nullptr && encode->text == "compute") compute();
        if (encode != nullptr && encode->text == "say nothing") continue;
        if (const auto* call = std::get_if<msg::ExpertCall>(&request->envelope.body)) {
            if (call->layer == 1) compute();
            msg::PartialSums sums;
            sums.read_ns = call->picks.size();
            request->responder.send(sums);
            continue;
        }
        if (std::holds_alternative<msg::Step>(request->envelope.body)) {
            msg::StepResult result;
            const std::byte bytes[8] = {};
            std::vector<msg::Bytes> none;
            result.output.shape = {1, 2};
            result.output.payload = *arena.write(bytes);
            request->responder.send(result);
            continue;
        }
        request->responder.send(msg::Encoded{{static_cast<std::uint32_t>(::getpid())}});
    }
}

}  // namespace

int main(int argc, char** argv) {
    ServiceOptions options;
    options.name = "peer";
    std::string mode = "serve";
    Settings settings("transport_test_peer", "A service for the tests of the transport.");
    add_service_settings(settings, options);
    settings.add_choice("mode", &mode, {"serve", "compute", "fail"}, "what it does after starting");
    Result<Settings::Action> action = settings.parse(argc, argv);
    if (!action.has_value()) return fail(action.error(), nullptr);
    if (auto begun = begin_service(options); !begun.has_value())
        return fail(begun.error(), nullptr);
    install_stop_signals();
    Server::Options how = options.server(msg::ServiceKind::tokenizer);
    how.lanes = std::move(LaneHost::create({})).value();
    auto server = Server::create(std::move(how));
    if (!server.has_value()) return fail(server.error(), nullptr);
    auto arena = Arena::create({segment_name(options.run(), options.name), 4096, 4});
    if (!arena.has_value()) return fail(arena.error(), server->get());
    if (mode == "fail")
        return fail({ErrorCode::corrupt, "shard 3 is damaged", "copy it again"}, server->get());
    msg::Announcement announcement;
    announcement.arena = (*arena)->probe();
    (*server)->set_ready(announcement);
    if (mode == "compute") compute();
    serve(**server, **arena);
    return 0;
}
