#include "tests/support/gateway_client.h"

#include <utility>

#include "common/base/check.h"
#include "common/transport/tensor_io.h"

namespace k3::test {

GatewayClient::GatewayClient(const std::string& endpoint, std::int64_t ms) {
    transport::Channel::Options options;
    options.endpoint = endpoint;
    options.peer = "gateway";
    auto channel = transport::Channel::create(options);
    K3_CHECK(channel.has_value(), channel.error().message);
    channel_ = std::move(*channel);
    const auto hello = channel_->hello({}, Deadline::after_ms(ms));
    K3_CHECK(hello.has_value(), hello.error().message);
}

std::uint64_t GatewayClient::submit(const msg::Submit& submit) {
    auto call_id = channel_->send(submit);
    K3_CHECK(call_id.has_value(), call_id.error().message);
    return *call_id;
}

Generation GatewayClient::collect(std::uint64_t call_id, std::int64_t ms) {
    Generation out;
    collect_more(call_id, out, ms);
    return out;
}

void GatewayClient::collect_more(std::uint64_t call_id, Generation& into, std::int64_t ms,
                                 const std::function<bool(const Generation&)>& until) {
    const Deadline deadline = Deadline::after_ms(ms);
    while (true) {
        auto reply = channel_->receive(call_id, deadline, true);
        if (!reply.has_value()) {
            into.error = reply.error();
            into.failed_service = channel_->failed_service();
            return;
        }
        if (take(std::move(*reply), into)) {
            channel_->forget(call_id);
            return;
        }
        if (until && until(into)) return;
    }
}

bool GatewayClient::take(transport::Reply reply, Generation& into) {
    if (auto* accepted = std::get_if<msg::Accepted>(&reply.body)) {
        into.accepted = std::move(*accepted);
    } else if (auto* loaded = std::get_if<msg::SessionLoaded>(&reply.body)) {
        into.loaded = *loaded;
    } else if (auto* saved = std::get_if<msg::SessionSaved>(&reply.body)) {
        into.saved = std::move(*saved);
    } else if (auto* progress = std::get_if<msg::PrefillProgress>(&reply.body)) {
        into.progress.push_back(*progress);
    } else if (auto* event = std::get_if<msg::TokenEvent>(&reply.body)) {
        ++into.n_events;
        into.ids.insert(into.ids.end(), event->ids.begin(), event->ids.end());
        into.text += event->text;
        into.logprobs.insert(into.logprobs.end(), event->logprobs.begin(), event->logprobs.end());
        if (!event->logits.empty()) {
            K3_CHECK(reply.frames.size() == 1, "logits come in one frame");
            const auto values = transport::view_as<float>(reply.frames[0]);
            auto& place = event->ids.empty() ? into.prompt_logits : into.token_logits;
            place.insert(place.end(), values.begin(), values.end());
        }
    } else if (auto* finished = std::get_if<msg::Finished>(&reply.body)) {
        into.finished = std::move(*finished);
        return true;
    }
    return false;
}

void GatewayClient::cancel(std::uint64_t request) { channel_->post(msg::Cancel{request}); }

msg::Submit submit_text(std::string text, std::uint32_t max_tokens) {
    msg::Submit out;
    out.input = msg::TextInput{std::move(text)};
    out.params.temperature = 0;
    out.max_tokens = max_tokens;
    return out;
}

msg::Submit submit_ids(std::vector<std::uint32_t> ids, std::uint32_t max_tokens) {
    msg::Submit out = submit_text("", max_tokens);
    out.input = msg::IdsInput{std::move(ids)};
    return out;
}

}  // namespace k3::test
