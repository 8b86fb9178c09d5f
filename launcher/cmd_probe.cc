// `k3pipe probe`: whether one service answers, for managers that ask by a program's exit code.

#include <fmt/format.h>

#include "common/transport/channel.h"
#include "common/transport/curve_keys.h"
#include "launcher/commands.h"
#include "launcher/endpoint_probe.h"

namespace k3::launcher {

namespace {

Status ask_service(const ProbeCommand& command) {
    transport::Channel::Options options;
    options.endpoint = command.endpoint;
    options.peer = "the service";
    if (!command.keys.empty()) {
        ASSIGN_OR_RETURN(options.keys, transport::CurveKeys::load(command.keys.string()));
    }
    ASSIGN_OR_RETURN(const auto channel, transport::Channel::create(std::move(options)));
    // Where nobody listens that is known at once.
    const EndpointProbe door = probe_endpoint(command.endpoint, command.wait_ms);
    if (door.finding != EndpointProbe::Finding::listening)
        return Error{ErrorCode::unavailable,
                     fmt::format("nobody answers at {}: {}", command.endpoint, door.reason),
                     "start the service, or correct the endpoint"};
    ASSIGN_OR_RETURN(const msg::Pong pong, channel->ping(Deadline::after_ms(command.wait_ms)));
    std::string state(msg::to_string(pong.state));
    if (pong.state == msg::State::loading)
        state += fmt::format(" ({} %)", pong.progress_permille / 10);
    if (!pong.detail.empty()) state += ": " + pong.detail;
    if (!pong.waiting_for.empty()) state += ", waits for " + pong.waiting_for;
    const bool is_ready = pong.state == msg::State::ready && pong.waiting_for.empty();
    const bool is_fine = command.alive ? pong.state != msg::State::failed : is_ready;
    if (!is_fine)
        return Error{ErrorCode::unavailable,
                     fmt::format("the service at {} is {}", command.endpoint, state),
                     "wait until it is ready, or look at its log"};
    fmt::print("{}\n", state);
    return Status::ok();
}

}  // namespace

int probe(const ProbeCommand& command) {
    const Status answered = ask_service(command);
    return answered.has_value() ? kExitOk : report(answered.error());
}

}  // namespace k3::launcher
