#include "launcher/gateway_client.h"

#include <fmt/format.h>

#include <array>
#include <optional>
#include <utility>
#include <variant>

#include "common/transport/tensor_io.h"

namespace k3::launcher {

namespace {

constexpr std::int64_t kSliceMs = 100;

/// Channel::hello in slices, so that the user can end the wait for a gateway that loads.
Result<msg::Announcement> patient_hello(transport::Channel& channel, Deadline deadline,
                                        const std::function<bool()>& give_up) {
    for (;;) {
        // The last slice takes what is left: a tiny one would end in a worse sentence.
        bool last = deadline.remaining_ms() < 2 * kSliceMs;
        auto answer = channel.hello({}, last ? deadline : Deadline::after_ms(kSliceMs));
        if (answer.has_value()) return answer;
        ErrorCode code = answer.error().code;
        bool may_come = code == ErrorCode::unavailable || code == ErrorCode::deadline_exceeded;
        if (!may_come || deadline.expired()) return answer;
        if (give_up()) return Error{ErrorCode::cancelled, "interrupted", ""};
    }
}

}  // namespace

Result<GatewayClient> GatewayClient::connect(const std::string& endpoint, std::uint64_t run_id,
                                             std::shared_ptr<const transport::CurveKeys> keys,
                                             Deadline deadline,
                                             const std::function<bool()>& give_up) {
    GatewayClient client;
    transport::Channel::Options options;
    options.endpoint = endpoint;
    options.peer = "gateway";
    options.run_id = run_id;
    options.keys = std::move(keys);
    ASSIGN_OR_RETURN(client.channel_, transport::Channel::create(std::move(options)));
    client.reader_ = std::make_unique<transport::ArenaReader>();
    ASSIGN_OR_RETURN(msg::Announcement announcement,
                     patient_hello(*client.channel_, deadline, give_up));
    auto* facts = std::get_if<msg::GatewayFacts>(&announcement.facts);
    if (facts == nullptr)
        return Error{ErrorCode::incompatible,
                     fmt::format("{} answers as a {} (called {}), not as a gateway", endpoint,
                                 msg::to_string(announcement.kind), announcement.name),
                     "give the endpoint of a gateway"};
    client.facts_ = std::move(*facts);
    return client;
}

Result<msg::Finished> GatewayClient::generate(const msg::Submit& submit, GenerationSink& sink,
                                              const std::function<bool()>& give_up) {
    request_ = 0;
    ASSIGN_OR_RETURN(std::uint64_t call, channel_->send(submit));
    for (;;) {
        if (give_up()) return cancel(call);
        Deadline slice = Deadline::after_ms(kSliceMs);
        auto reply = channel_->receive(call, slice, true);
        if (!reply.has_value()) {
            // The slice is ours; a deadline that a service reports comes before its end.
            if (reply.error().code == ErrorCode::deadline_exceeded && slice.expired()) continue;
            if (give_up()) return cancel(call);  // the reason is ours, whatever it looks like
            Error error = std::move(reply).error();
            // It was not us who withdrew: a stage behind the gateway was told to stop.
            if (error.code == ErrorCode::cancelled) error.code = ErrorCode::unavailable;
            return error;
        }
        if (auto* finished = std::get_if<msg::Finished>(&reply->body)) {
            channel_->forget(call);
            return std::move(*finished);
        }
        if (Status delivered = deliver(*reply, sink); !delivered) {
            [[maybe_unused]] Error ended = cancel(call);
            return std::move(delivered).error();
        }
    }
}

Status GatewayClient::deliver(transport::Reply& reply, GenerationSink& sink) {
    if (auto* accepted = std::get_if<msg::Accepted>(&reply.body)) {
        request_ = accepted->request;
        return sink.accepted(*accepted);
    }
    if (auto* loaded = std::get_if<msg::SessionLoaded>(&reply.body))
        return sink.session_loaded(*loaded);
    if (auto* saved = std::get_if<msg::SessionSaved>(&reply.body))
        return sink.session_saved(*saved);
    if (auto* progress = std::get_if<msg::PrefillProgress>(&reply.body)) {
        sink.progress(*progress);
        return Status::ok();
    }
    auto* event = std::get_if<msg::TokenEvent>(&reply.body);
    if (event == nullptr)
        return Error{ErrorCode::internal,
                     fmt::format("the gateway answered a Submit with {}", msg::name_of(reply.body)),
                     "check that the endpoint belongs to a gateway of this version"};
    if (event->logits.empty()) return sink.tokens(*event, {});
    const std::array<std::uint64_t, 2> shape = {0, facts_.vocab_size};
    ASSIGN_OR_RETURN(msg::Bytes bytes,
                     transport::take_tensor(event->logits, "logits of the gateway", msg::DType::f32,
                                            shape, reply.frames, *reader_));
    return sink.tokens(*event, transport::view_as<float>(bytes));
}

Error GatewayClient::cancel(std::uint64_t call) {
    channel_->forget(call);
    if (request_ != 0) channel_->post(msg::Cancel{request_});
    return Error{ErrorCode::cancelled, "interrupted", ""};
}

}  // namespace k3::launcher
